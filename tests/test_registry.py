"""@op: what it registers, how CUDA kernels come in, and that every op of the library is whole."""

import inspect
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import Tensor

import cutegemm
import cutegemm.quantize
from cutegemm import library
from cutegemm.registry import OPS, Input, nbytes, op

pytestmark = pytest.mark.usefixtures("one_thread")

LIBRARY_OPS = dict(OPS)  # without those that this file makes


@op("registry_twice(Tensor x, float factor=2.0) -> Tensor", cases=[{"x": Input((3, 5))}])
def twice(x: Tensor, factor: float = 2.0) -> Tensor:
    """x, scaled."""
    return x * factor


@op("registry_cast(Tensor x, ScalarType dtype=bfloat16) -> Tensor")
def cast(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return x.to(dtype, copy=True)


@op("registry_add_(Tensor(a!) x, Tensor y) -> ()", bytes=lambda x, y: 2 * nbytes(x) + nbytes(y))
def add_(x: Tensor, y: Tensor) -> None:
    x += y


@op(
    "registry_nonzero(Tensor x, int most) -> Tensor",
    fake=lambda x, most: x.new_empty(most, dtype=torch.int64),
    flops=lambda x, most: x.numel(),
)
def nonzero(x: Tensor, most: int) -> Tensor:
    indices = x.nonzero().flatten().tolist()[:most]
    return torch.tensor(indices + [-1] * (most - len(indices)))


MINE = {name.removeprefix("registry_"): OPS.pop(name) for name in OPS.keys() - LIBRARY_OPS.keys()}


def test_op_is_a_torch_op_with_the_references_face() -> None:
    assert twice is torch.ops.cutegemm.registry_twice.default
    assert twice.__doc__ == "x, scaled."
    assert list(inspect.signature(twice).parameters) == ["x", "factor"]
    assert torch.equal(twice(torch.ones(3), factor=3.0), torch.full((3,), 3.0))
    assert MINE["twice"].family == "test_registry"


def test_meta_and_fake() -> None:
    assert twice(torch.ones(3, 4, device="meta")).shape == (3, 4)
    assert nonzero(torch.ones(9, device="meta"), 4).shape == (4,)
    torch.library.opcheck(twice, (torch.randn(3, 4),))
    torch.library.opcheck(nonzero, (torch.randn(9), 4))


def test_dtype_and_mutation_arguments() -> None:
    assert cast(torch.ones(3), dtype=torch.float16).dtype == torch.float16
    assert cast(torch.ones(3)).dtype == torch.bfloat16
    x = torch.ones(3)
    assert add_(x, torch.ones(3)) is None
    assert x.tolist() == [2.0, 2.0, 2.0]
    torch.library.opcheck(add_, (torch.randn(3), torch.randn(3)))


def test_cost() -> None:
    x = torch.ones(3, 5)
    assert MINE["twice"].bytes(x=x) == MINE["twice"].bytes(x) == 2 * 15 * 4
    assert MINE["cast"].bytes(x=x, dtype=torch.bfloat16) == 15 * 4 + 15 * 2
    assert MINE["add_"].bytes(x=x, y=x) == 3 * 15 * 4
    assert MINE["nonzero"].flops(x=x, most=2) == 15
    assert MINE["twice"].flops(x=x) == 0


def test_cost_of_ops_by_hand() -> None:
    def cost(name: str) -> int:
        each = LIBRARY_OPS[name]
        return each.bytes(**each.inputs(each.cases[0]))

    x, weight, codes, scale = 5 * 96 * 2, 96 * 2, 5 * 96, 5 * 4
    assert cost("rms_norm_quant") == x + weight + codes + scale == 1652
    assert cost("fused_add_rms_norm_quant_") == x + 2 * x + weight + codes + scale == 3572  # residual: read and written
    assert cost("fused_add_rms_norm_") == 2 * x + 2 * x + weight == 4032
    assert cost("activation_quant") == 2 * x + codes + scale == 2420
    assert cost("activation_out") == 2 * x + x == 2880


def test_inputs() -> None:
    case = {
        "x": Input((4, 6), torch.float8_e4m3fn, transposed=True),
        "scale": Input((9,), torch.float32, positive=True),
        "index": Input((99,), torch.int32, high=7),
        "eps": 1e-6,
    }
    made = MINE["twice"].inputs(case)
    assert made["x"].shape == (4, 6) and made["x"].stride() == (1, 4)
    assert made["x"].dtype == torch.float8_e4m3fn
    assert bool((made["scale"] >= 0.5).all() and (made["scale"] < 1.5).all())
    assert set(made["index"].tolist()) == set(range(7))
    assert made["eps"] == 1e-6
    again, other = MINE["twice"].inputs(case), MINE["twice"].inputs(case, seed=1)
    assert torch.equal(made["scale"], again["scale"]) and not torch.equal(made["scale"], other["scale"])


def test_a_name_is_used_once() -> None:
    with pytest.raises(ValueError, match=r"op quantize_fp8: quantize.py has registered it"):
        op("quantize_fp8(Tensor x) -> Tensor")(lambda x: x)


def test_reference_and_schema_have_the_same_arguments() -> None:
    with pytest.raises(TypeError, match=r"the reference takes \['y'\]; it must take \['x'\]"):
        op("registry_mismatch(Tensor x) -> Tensor")(lambda y: y)


def test_no_gradient_flows() -> None:
    x = torch.ones(3, requires_grad=True)
    y = twice(x)
    with pytest.warns(UserWarning, match="registry_twice: an autograd kernel was not registered"):
        y.sum().backward()
    assert x.grad is None
    with torch.no_grad():
        assert not twice(x).requires_grad


# The stub. Without a GPU, CPU tensors go to the CUDA key, and Python functions stand for the op library.


def on_cuda_key(call, *args):
    return call.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args)


class Family:
    """Two fresh ops of one family, and a stand-in for library.load."""

    def __init__(self, prefix: str):
        self.names = [f"{prefix}_first", f"{prefix}_second"]
        self.first = op(f"{self.names[0]}(Tensor x) -> Tensor")(lambda x: x + 1)
        self.second = op(f"{self.names[1]}(Tensor x) -> Tensor")(lambda x: x + 2)
        for name in self.names:
            del OPS[name]
        self.kernels = torch.library.Library("cutegemm", "IMPL")
        self.lock = threading.Lock()
        self.loads = 0
        self.seconds = 0.0  # that loading takes
        self.error: Exception | None = None

    def load(self, family: str) -> None:
        assert family == "test_registry"
        with self.lock:
            if self.loads == 0:
                time.sleep(self.seconds)
                if self.error:
                    raise self.error
                self.register()
                self.loads = 1

    def register(self) -> None:
        self.kernels.impl(self.names[0], lambda x: x + 10, "CUDA")
        self.kernels.impl(self.names[1], lambda x: x + 20, "CUDA")


@pytest.fixture
def family(request, monkeypatch):
    made = Family(request.node.name)
    monkeypatch.setattr(cutegemm, "library", made, raising=False)
    yield made
    made.kernels._destroy()


def test_first_cuda_call_loads_the_family(family) -> None:
    x = torch.zeros(2)
    assert on_cuda_key(family.first, x).tolist() == [10, 10]
    assert family.loads == 1
    family.load = None  # nothing asks for it again
    assert on_cuda_key(family.first, x).tolist() == [10, 10]
    assert on_cuda_key(family.second, x).tolist() == [20, 20]
    assert family.first(x).tolist() == [1, 1]  # the CPU keeps its own


def test_library_loaded_by_other_means(family) -> None:
    family.register()
    assert on_cuda_key(family.second, torch.zeros(2)).tolist() == [20, 20]
    assert family.loads == 0


def test_no_thread_finds_an_op_without_a_kernel(family) -> None:
    family.seconds = 0.05
    start, results = threading.Barrier(16), []

    def run(call) -> None:
        start.wait()
        for _ in range(20):
            results.append((call, on_cuda_key(call, torch.zeros(1)).item()))

    threads = [threading.Thread(target=run, args=(call,)) for call in 8 * [family.first, family.second]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16 * 20
    assert all(value == (10 if call is family.first else 20) for call, value in results)


def test_failed_load_raises_its_own_error_each_time(family) -> None:
    family.error = RuntimeError("no nvcc")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no nvcc"):
            on_cuda_key(family.first, torch.zeros(1))
    family.error = None
    assert on_cuda_key(family.first, torch.zeros(1)).item() == 10


def test_library_without_the_op(family) -> None:
    family.register = lambda: None
    with pytest.raises(RuntimeError, match=r"_first: the op library of test_registry has no kernel for it"):
        on_cuda_key(family.first, torch.zeros(1))


def test_other_layouts_and_devices_are_refused(family) -> None:
    x = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)
    with pytest.raises(NotImplementedError, match=r"was called for DispatchKey.SparseCPU; tensors must be"):
        family.first(x)
    assert family.loads == 0


FIRST_CALLS = {
    "eager": "q, s = f(x)",
    "compile": "q, s = torch.compile(f, fullgraph=True)(x)",
    "graph": """
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    q, s = f(x)
x.copy_(torch.arange(64, device='cuda').view(4, 16) - 3.0)
g.replay()
""",
}


@pytest.mark.gpu
@pytest.mark.parametrize("how", FIRST_CALLS)
def test_first_call_on_a_gpu(how: str) -> None:
    program = f"""
import torch
from cutegemm.quantize import quantize_fp8
f = lambda x: quantize_fp8(x, granularity="token")
x = torch.arange(64, device="cuda").view(4, 16).float()
{FIRST_CALLS[how]}
torch.cuda.synchronize()
want = f(x.cpu())
assert torch.equal(q.cpu().view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(s.cpu(), want[1])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr


# Every op of the library.


def kernels_in_csrc() -> dict[str, str]:
    """Names in m.impl("...") lines of CUDA registrations -> family."""
    found: dict[str, str] = {}
    for path in [*library.csrc().glob("*.cu"), *library.csrc().glob("*.cpp")]:
        text = path.read_text()
        if "STABLE_TORCH_LIBRARY_IMPL(cutegemm, CUDA" in text:
            family = "gemm" if path.name == "dispatch.cpp" else path.stem
            found |= dict.fromkeys(re.findall(r'm\.impl\("([\w.]+)"', text), family)
    return found


def test_every_op_has_a_kernel_in_its_familys_source_and_every_kernel_an_op() -> None:
    assert kernels_in_csrc() == {name: op.family for name, op in LIBRARY_OPS.items()}


@pytest.mark.parametrize("name", LIBRARY_OPS)
def test_every_op_has_cases_and_doc(name: str) -> None:
    assert LIBRARY_OPS[name].cases
    assert LIBRARY_OPS[name].reference.__doc__


CASES = [(name, i) for name, op in LIBRARY_OPS.items() for i in range(len(op.cases))]


@pytest.mark.parametrize(("name", "i"), CASES)
def test_opcheck(name: str, i: int, device: str) -> None:
    each = LIBRARY_OPS[name]
    inputs = each.inputs(each.cases[i], device)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(x, torch.Tensor) and x.dtype.itemsize == 1 and x.is_floating_point() for x in inputs.values()):
        # torch looks for changed arguments with allclose, which it has not got for FP8: by their bytes, then.
        tests.remove("test_schema")
        named = {key: x for key, x in inputs.items() if isinstance(x, torch.Tensor) and key != "out"}
        before = {key: x.clone() for key, x in named.items()}
        each.call(**inputs)
        for key, x in named.items():
            assert torch.equal(before[key].contiguous().view(torch.uint8), x.contiguous().view(torch.uint8)), key
    torch.library.opcheck(each.call, (), inputs, test_utils=tests)


@pytest.mark.parametrize(("name", "i"), CASES)
def test_cost_of_every_case(name: str, i: int) -> None:
    each = LIBRARY_OPS[name]
    inputs = each.inputs(each.cases[i])
    assert each.bytes(**inputs) >= 0
    assert each.flops(**inputs) >= 0
