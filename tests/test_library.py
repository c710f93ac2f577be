from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cutegemm
from cutegemm import library
from cutegemm.tools import build as build_tool

KERNELS = {"gemm_small": "// small\n", "gemm_large": "// large\n", "other": "// other\n"}

# Stands for nvcc: tells a version and where its toolkit is, "compiles" anything, leaves a line in `calls`.
NVCC = """#!/bin/sh
PATH=/usr/bin:/bin
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88"; exit ;;
  --dryrun) echo '#$ TOP={root}' >&2; exit ;;
esac
echo "$@" >> {root}/calls
sleep {seconds}
cat {root}/log
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
exit {exit_code}
"""


class Toolkit:
    def __init__(self, root: Path, release: str = "13.0", log: str = "", seconds: float = 0, exit_code: int = 0):
        self.root, self.nvcc = root, root / "bin/nvcc"
        self.nvcc.parent.mkdir(parents=True)
        (root / "lib64").mkdir()
        (root / "lib64/libcudart.so.13").touch()
        (root / "log").write_text(log)
        text = NVCC.format(release=release, root=root, seconds=seconds, exit_code=exit_code)
        self.nvcc.write_text(text)
        self.nvcc.chmod(0o755)

    def calls(self) -> int:
        file = self.root / "calls"
        return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with no compiler and nothing built, and a csrc/ with one op family, `op`."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "CUTEGEMM_LIB"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUTEGEMM_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "op.cu").write_text('#include "outer.h"\n#include <vector>\n')
    (sources / "outer.h").write_text('#pragma once\n  #  include "inner.h"\n')
    (sources / "inner.h").write_text('#include "outer.h"\n')
    (sources / "unused.h").write_text("")
    emit = SimpleNamespace(names=lambda: list(KERNELS), source=KERNELS.__getitem__)
    monkeypatch.setattr("cutegemm.tools.emit", emit, raising=False)
    monkeypatch.setattr(library, "csrc", lambda: sources)
    monkeypatch.setattr(library, "_PACKAGE", tmp_path / "package")
    monkeypatch.setattr(library, "_part", lambda name: Path(library.__file__).parents[1] / name)
    monkeypatch.setattr(library, "_pip_folders", list)
    monkeypatch.setattr(library, "_cutlass", lambda: tmp_path)
    monkeypatch.setattr(library.importlib.metadata, "version", lambda package: "4.2")
    monkeypatch.setattr(library, "sources", lambda: "the sources")
    library._probe.cache_clear()
    yield tmp_path
    library._probe.cache_clear()


@pytest.fixture
def toolkit(place: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    monkeypatch.setenv("CUDA_HOME", str(place / "cuda"))
    return Toolkit(place / "cuda")


def leftovers(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "cache/lib").iterdir() if not path.name.endswith(".lock"))


def test_case_059_import_needs_no_compiler_and_no_build_packages() -> None:
    lazy = {"cutlass_library", "filelock", "platformdirs", "rich"}
    code = f"import sys, cutegemm; print({lazy} & set(sys.modules))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CU")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**environment, "PATH": ""}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_builds_once(toolkit: Toolkit) -> None:
    assert library.built("op") is None
    path = library.op_library("op")
    assert re.fullmatch(r"op-[0-9a-f]{16}\.so", path.name)
    assert path.read_text() == "compiled\n"
    assert library.op_library("op") == library.built("op") == path
    assert toolkit.calls() == 1
    assert path.parent.stat().st_mode & 0o777 == path.parent.parent.stat().st_mode & 0o777 == 0o700


def test_what_is_compiled_with(toolkit: Toolkit) -> None:
    library.build(["op", "gemm_small"])
    op, kernel = sorted((toolkit.root / "calls").read_text().splitlines(), key=lambda line: "gemm" in line)
    for command in (op, kernel):
        assert "-DNDEBUG" in command and "sm_90a" in command and "-cudart none" in command
        assert command.endswith(f"-Xlinker {toolkit.root}/lib64/libcudart.so.13")
    assert "TORCH_TARGET_VERSION=0x020a" in op and "torch/include" in op
    assert "torch" not in kernel and "CUTLASS_ENABLE_GDC_FOR_SM90" in kernel


def test_some_have_code_for_ampere_too(toolkit: Toolkit, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "csrc/gather.cu").write_text("// gather\n")
    monkeypatch.setitem(KERNELS, "of_ampere", '#include "gemm_sm80.cuh"\n')
    library.build(["op", "gather", "gemm_small", "of_ampere"])
    calls = (toolkit.root / "calls").read_text().splitlines()
    both = {re.sub(r".* (\w+)\.so .*", r"\1", call): "arch=compute_80,code=sm_80" in call for call in calls}
    assert both == {"op": False, "gather": True, "gemm_small": False, "of_ampere": True}
    assert all("arch=compute_90a,code=sm_90a" in call for call in calls)


@pytest.mark.parametrize("changed", ["op.cu", "outer.h", "inner.h", "unused.h"])
def test_key_follows_the_sources(toolkit: Toolkit, place: Path, changed: str) -> None:
    before = library.op_library("op")
    with open(place / "csrc" / changed, "a") as file:
        file.write("// changed\n")
    assert (library.op_library("op") == before) == (changed == "unused.h")


def test_key_follows_compiler_flags_and_cutlass(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [library.kernel("gemm_small")]
    monkeypatch.setattr(library.importlib.metadata, "version", lambda package: "4.3")
    paths.append(library.kernel("gemm_small"))
    monkeypatch.setattr(library, "_KERNEL_FLAGS", ["-DOTHER"])
    paths.append(library.kernel("gemm_small"))
    toolkit.nvcc.write_text(toolkit.nvcc.read_text().replace("13.0", "13.1"))
    library._probe.cache_clear()
    paths.append(library.kernel("gemm_small"))
    assert len(set(paths)) == 4


def test_same_sources_elsewhere_build_nothing(toolkit: Toolkit, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library.op_library("op")
    shutil.copytree(place / "csrc", place / "another checkout")
    shutil.copytree(toolkit.root, place / "another toolkit")
    monkeypatch.setattr(library, "csrc", lambda: place / "another checkout")
    monkeypatch.setenv("CUDA_HOME", str(place / "another toolkit"))
    library._probe.cache_clear()
    assert library.op_library("op") == path
    assert toolkit.calls() == 1


def test_relative_folders(toolkit: Toolkit, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("CUTEGEMM_CACHE", "cache")
    monkeypatch.setenv("CUDA_HOME", "cuda")
    assert library.op_library("op").parent == place / "cache/lib"


@pytest.mark.parametrize("damage", ["changed", "truncated", "no seal", "only a seal"])
def test_damaged_file_is_built_again(toolkit: Toolkit, damage: str) -> None:
    path = library.op_library("op")
    if damage == "changed":
        path.write_text("COMPILED\n")
    elif damage == "truncated":
        path.write_text("")
    elif damage == "no seal":
        Path(f"{path}.sha256").unlink()
    else:
        path.unlink()
    assert library.built("op") is None
    assert library.op_library("op") == path
    assert path.read_text() == "compiled\n"
    assert toolkit.calls() == 2


def test_two_processes_build_once(place: Path) -> None:
    toolkit = Toolkit(place / "cuda", seconds=1)
    code = """
import pathlib, sys, time
from cutegemm import library
place = pathlib.Path(sys.argv[1])
library.csrc = lambda: place / "csrc"
library.nvcc()
print("ready", flush=True)
sys.stdin.readline()
print(library.op_library("op"), flush=True)
"""
    environment = {**os.environ, "CUDA_HOME": str(toolkit.root)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(place)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert printed[0] == printed[1]
    assert Path(printed[0].strip()).read_text() == "compiled\n"
    assert toolkit.calls() == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
@pytest.mark.parametrize("folder", ["cache", "cache/lib"])
def test_refuses_a_cache_that_others_can_write(toolkit: Toolkit, place: Path, folder: str, mode: int) -> None:
    library.op_library("op")
    (place / folder).chmod(mode)
    with pytest.raises(RuntimeError, match=rf"the cache {place / folder} .* mode {mode:o}.*writable by you alone"):
        library.op_library("op")


def test_refuses_somebody_elses_cache(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody_else = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody_else)
    with pytest.raises(RuntimeError, match="it must belong to you"):
        library.op_library("op")


def test_cache_that_cannot_be_made(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEGEMM_CACHE", str(toolkit.nvcc / "cache"))
    with pytest.raises(RuntimeError, match=r"can't be written \(Not a directory\): set CUTEGEMM_CACHE to a folder"):
        library.op_library("op")


def test_full_disk(toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(RuntimeError, match=r"can't be written \(No space left on device\): set CUTEGEMM_CACHE"):
        library.op_library("op")


def test_case_059_no_compiler(place: Path) -> None:
    with pytest.raises(RuntimeError, match=r'needs nvcc.*pip install "cutegemm\[build\]".*CUTEGEMM_LIB') as error:
        library.op_library("op")
    assert "\n" not in str(error.value)
    assert library.built("op") is None


def test_case_059_old_compiler_is_passed_over(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    old, good = Toolkit(place / "old", release="12.1"), Toolkit(place / "good", release="12.4")
    monkeypatch.setenv("CUDA_HOME", str(place / "missing"))
    monkeypatch.setenv("CUDA_PATH", str(old.root))
    monkeypatch.setenv("PATH", str(good.nvcc.parent))
    assert library.nvcc().path == good.nvcc
    library.op_library("op")
    told = capfd.readouterr().err
    assert f"passed over {old.nvcc} (CUDA_PATH) is version 12.1.88, and must be 12.4 or newer" in told
    assert f"passed over {place}/missing/bin/nvcc (CUDA_HOME) does not exist" in told


def test_case_059_only_an_old_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(Toolkit(place / "old", release="12.1").root))
    with pytest.raises(RuntimeError, match=r"12\.1\.88, and must be 12\.4 or newer.*Install one"):
        library.op_library("op")


def test_compiler_that_does_not_run(place: Path, toolkit: Toolkit) -> None:
    toolkit.nvcc.write_text(toolkit.nvcc.read_text().replace("--dryrun) ", "--dryrun) echo no g++; exit 1; "))
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler, as g\+\+: 'no g\+\+'"):
        library.op_library("op")
    toolkit.nvcc.write_text("not a program")
    library._probe.cache_clear()
    with pytest.raises(RuntimeError, match="nvcc"):
        library.op_library("op")


@pytest.mark.parametrize(
    "log, sentence",
    [
        ("ptxas info    : (C7510) Potential Performance Loss: wgmma serialized", "ptxas serializes WGMMA"),
        ("ptxas warning : C7508 something", "ptxas serializes WGMMA"),
        ("    8 bytes stack frame, 12 bytes spill stores, 0 bytes spill loads", "registers spill"),
        ("    0 bytes stack frame, 0 bytes spill stores, 120 bytes spill loads", "registers spill"),
        ("    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", ""),
    ],
)
def test_ptxas_faults(toolkit: Toolkit, place: Path, log: str, sentence: str) -> None:
    (toolkit.root / "log").write_text(f"ptxas info    : 0 bytes gmem\n{log}\n")
    if not sentence:
        library.kernel("gemm_small")
        return
    with pytest.raises(RuntimeError, match=f"gemm_small: {sentence}") as error:
        library.kernel("gemm_small")
    assert log in str(error.value)
    assert leftovers(place) == []
    if "spill" in sentence:  # hand-written kernels may, if they have to
        library.op_library("op")


def test_failures_are_all_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = Toolkit(place / "cuda", log="op.cu(12): error: expected a ;\n", exit_code=2)
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    with pytest.raises(RuntimeError) as error:
        library.build(["op", "other"])
    for part in (
        "op: nvcc failed with exit code 2",
        "other: nvcc failed",
        "op.cu(12): error: expected a ;",
        "-DNDEBUG",
    ):
        assert part in str(error.value)
    assert toolkit.calls() == 2
    assert leftovers(place) == []


def test_names(toolkit: Toolkit, place: Path) -> None:
    assert library.select() == ["op", *KERNELS]
    assert library.select((), ["gemm_*", "gemm_small"]) == ["gemm_small", "gemm_large"]
    assert library.select(None, ()) == ["op"]
    with pytest.raises(ValueError, match="no kernel matches 'nothing_\\*'"):
        library.select((), ["nothing_*"])
    with pytest.raises(ValueError, match="no op library or kernel 'gemm_smal'; near it: gemm_small"):
        library.kernel("gemm_smal")
    assert set(library.build_all(None, ["other"])) == {"op", "other"}


def test_built_ahead(toolkit: Toolkit, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place / "carried"
    assert library.export(["op", "other"], folder) == [folder / "op.so", folder / "other.so"]
    assert sorted(path.suffix for path in folder.iterdir()) == [".sha256", ".sha256", ".so", ".so"]

    # Elsewhere: no compiler, an empty cache.
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("CUTEGEMM_CACHE", str(place / "empty"))
    library._probe.cache_clear()
    for variable, target in (("CUTEGEMM_LIB", folder), ("", place / "package/lib")):
        if variable:
            monkeypatch.setenv(variable, str(folder))
        else:
            monkeypatch.delenv("CUTEGEMM_LIB")
            shutil.copytree(folder, target)
        assert library.op_library("op") == library.built("op") == target / "op.so"
    assert not (place / "empty").exists()

    stale = rf"needs nvcc.*\({place}/package/lib/op.so is there, but is damaged or was built from other sources\)"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=stale):
        patch.setattr(library, "sources", lambda: "other sources")
        library.op_library("op")
    (place / "package/lib/op.so").write_text("damaged")
    with pytest.raises(RuntimeError, match=stale):
        library.op_library("op")


def test_sources_are_hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digest = library.sources.__wrapped__
    before = digest()
    assert digest() == before
    shutil.copytree(library.csrc(), tmp_path / "csrc")
    monkeypatch.setattr(library, "csrc", lambda: tmp_path / "csrc")
    assert digest() == before
    with open(tmp_path / "csrc/kernel_abi.h", "a") as file:
        file.write("\n")
    assert digest() != before


def test_command(toolkit: Toolkit, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_tool.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == ["op", *KERNELS]
    assert build_tool.main(["--ops", "--out", str(place / "out")]) == 0
    assert capsys.readouterr().out == f"        9 B  {place}/out/op.so\n"
    assert build_tool.main(["--kernels", "gemm_*", "--jobs", "1"]) == 0
    assert toolkit.calls() == 3
    assert build_tool.main(["--kernels", "nothing"]) == 1
    assert "no kernel matches 'nothing'" in capsys.readouterr().err


def compile_c(path: Path, code: str, *options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".c").write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", path.with_suffix(".c"), "-o", path, *options], check=True)
    return path


@pytest.fixture
def loadable(monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_load_is_done_once(loadable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    path = compile_c(tmp_path / "op.so", "int cutegemm_test_loaded = 7;")
    monkeypatch.setattr(library, "op_library", lambda family: asked.append(family) or path)
    library.load("op")
    library.load("op")
    assert asked == ["op"]
    assert ctypes.c_int.in_dll(ctypes.CDLL(str(path), os.RTLD_NOLOAD), "cutegemm_test_loaded").value == 7


def test_chain_launches_reaches_libraries_before_and_after_they_load(
    loadable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "int chained = 1; void cutegemm_chain(int on) { chained = on; }"
    paths = {name: compile_c(tmp_path / f"{name}.so", code) for name in ("first", "second")}
    monkeypatch.setattr(library, "op_library", paths.__getitem__)
    monkeypatch.setattr(library, "_chain", True)

    def chained(name: str) -> int:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(paths[name]), os.RTLD_NOLOAD), "chained").value

    library.load("first")
    assert chained("first") == 1
    cutegemm.chain_launches(False)
    library.load("second")
    assert (chained("first"), chained("second")) == (0, 0)
    cutegemm.chain_launches(True)
    assert (chained("first"), chained("second")) == (1, 1)


def test_case_058_undefined_symbol(loadable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile_c(tmp_path / "op.so", "extern int no_such_symbol; int* p = &no_such_symbol;")
    monkeypatch.setattr(library, "op_library", lambda family: path)
    version = re.escape(torch.__version__)
    with pytest.raises(RuntimeError, match=rf"can't be loaded into torch {version} .*no_such_symbol.*2\.10 or newer"):
        library.load("op")
    assert library._loaded == {}


def test_case_058_another_cuda_runtime(loadable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soname = "libcudart.so.9999"
    runtime = compile_c(tmp_path / "nvidia/cu9999/lib" / soname, "int runtime;", f"-Wl,-soname,{soname}")
    path = compile_c(tmp_path / "op.so", "extern int runtime; int* p = &runtime;", str(runtime))
    monkeypatch.setattr(library, "op_library", lambda family: path)
    monkeypatch.setattr(library, "_pip_folders", list)
    with pytest.raises(RuntimeError, match=rf"{soname}: cannot open.*the CUDA runtime it was built for"):
        library.load("op")
    monkeypatch.setattr(library, "_pip_folders", lambda: [tmp_path / "nvidia"])
    library.load("op")
    assert list(library._loaded) == ["op"]


def test_case_058_old_torch(loadable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1"))
    with pytest.raises(RuntimeError, match=r"torch is 2\.9\.1, and must be 2\.10 or newer"):
        library.load("op")


def test_another_gpu(loadable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RuntimeError, match=r"capability 9\.0 .*this machine has NVIDIA A100 \(8\.0\)"):
        library.load("op")
    for family in ("gather", "gemm"):  # some of whose kernels are for it, which can't be chained
        library._check_machine(family)
    assert not library._chains()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(RuntimeError, match=r"capability 9\.0 .*this machine has NVIDIA A100 \(10\.0\)"):
        library.load("gemm")


def test_real_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(library._probe(), library.Nvcc):
        pytest.skip("needs nvcc")
    source = "__global__ void f(int* x) { *x = 1; } extern int launch() { f<<<1, 1>>>(nullptr); return 0; }\n"
    emit = SimpleNamespace(names=lambda: ["small"], source=lambda name: source)
    monkeypatch.setattr("cutegemm.tools.emit", emit, raising=False)
    monkeypatch.setattr(library, "_cutlass", lambda: tmp_path)
    monkeypatch.setattr(library.importlib.metadata, "version", lambda package: "4.2")
    monkeypatch.setenv("CUTEGEMM_CACHE", str(tmp_path / "cache"))
    file = library.kernel("small").read_bytes()
    assert file.startswith(b"\x7fELF") and len(file) < 100_000
    assert b"libcudart.so." in file and b"torch" not in file and str(tmp_path).encode() not in file
