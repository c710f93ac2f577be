"""The bench, the tuner and the roofline without a GPU: what they make of times, what they refuse to time."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import cutegemm
from cutegemm import plan, roofline, testing
from cutegemm.tools import bench, figure, timed, tune, weights
from cutegemm.tools import heads as head_ops
from cutegemm.tools import rows as row_ops

FP8, BF16 = bench.FAMILIES["gemm_fp8"], bench.FAMILIES["gemm_bf16"]


def row(m, us, k=64, n=48, **peers):
    return {
        "op": "scaled_mm", "mode": "token-channel", "m": m, "n": n, "k": k, "kernel": "some",
        "floor_us": 2.0, "err": 0.0017, "us": us, "tflops": 1.0, "peers": peers,
    }  # fmt: skip


META = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "date": "2026-12-01",
    "commit": "abc",
    "peers": {},
}
HOST = row(1, 2.5, torch_row=3.0) | {"eager_us": 4.0, "peers_eager_us": {"torch_row": 6.04}}
ROWS = [
    row(1, 4.0, torch_row=8.0, torch_tensor=6.0),
    row(1, 4.0, k=96, torch_row=2.0, torch_tensor=6.0),
    row(256, 123.4, torch_row=246.8),
    HOST,
]


# The roofline


@pytest.mark.parametrize(
    "nbytes, us",
    [
        (0, 0.73),
        (0.5e6, (0.73 + 2.0) / 2),
        (1e6, 2.0),
        (16.8e6, 5.86),
        ((8.7e6 + 16.8e6) / 2, (3.95 + 5.86) / 2),
        (235e6, 56.4),
        (235e6 + 43e6, 66.4),
    ],
)
def test_read_floor_is_the_table_and_linear_between_its_points(nbytes, us):
    assert roofline.read_floor_us(nbytes) == pytest.approx(us, rel=1e-9)


def test_gemm_costs_by_hand():
    assert roofline.gemm_flops(2, 3, 5) == 60
    assert roofline.gemm_bytes(2, 3, 5) == (10 + 15) * 2 + 6 * 2
    assert roofline.gemm_bytes(2, 3, 5, torch.float8_e4m3fn, torch.float32, scales=5) == 10 + 15 + 6 * 4 + 5 * 4
    assert roofline.gemm_bytes(2, 3, 5, weight=7) == 10 * 2 + 7 + 6 * 2


def test_floor_is_bytes_for_few_tokens_and_flops_for_many():
    def floor(m, dtype):
        nbytes, flops = roofline.gemm_bytes(m, 6144, 4096, dtype), roofline.gemm_flops(m, 6144, 4096)
        return nbytes, roofline.floor_us(nbytes, flops, dtype)

    nbytes, few = floor(1, torch.float8_e4m3fn)
    assert few == roofline.read_floor_us(nbytes) == pytest.approx(7.8, abs=0.1)
    # 2 * 8192 * 6144 * 4096 = 412.3 GFLOP
    assert floor(8192, torch.float8_e4m3fn)[1] == pytest.approx(272.3, abs=0.1)
    assert floor(8192, torch.bfloat16)[1] == pytest.approx(530.0, abs=0.1)


# What is made of the times


def test_ratios_are_peer_over_ours_and_leave_the_host_row_out():
    assert [ratio for ratio, _ in bench.ratios(ROWS, "torch_row")] == [0.5, 2.0, 2.0]
    assert [ratio for ratio, _ in bench.ratios(ROWS, "torch_row", 2)] == [2.0]
    assert [ratio for ratio, _ in bench.ratios(ROWS, "torch_row", 1, 255)] == [0.5, 2.0]
    assert bench.ratios(ROWS, "vllm") == []


def test_ratios_to_the_better_of_two_to_the_floor_and_by_the_size_of_a_weight():
    rows = [row(1, 4.0, k=4096, n=12207, a=8.0, b=6.0), row(2, 4.0, k=4096, n=12208, b=10.0, c=2.0), row(3, 4.0, c=1.0)]
    assert [ratio for ratio, _ in bench.ratios(rows, "a or b")] == [1.5, 2.5]
    assert [ratio for ratio, _ in bench.ratios(rows, "best")] == [0.25, 0.5, 1.5]
    assert [ratio for ratio, _ in bench.ratios(rows, "floor")] == [0.5] * 3
    assert [found["m"] for _, found in bench.ratios(rows, "best", large=True)] == [2]  # of 50_003_968 elements
    assert [found["m"] for _, found in bench.ratios(rows, "best", large=False)] == [3, 1]


@pytest.mark.parametrize(
    "bar, passed, value",
    [
        (bench.Bar("gemm_fp8", "torch_row", "geomean", 1.0, last=64), True, "1.000"),
        (bench.Bar("gemm_fp8", "torch_row", "geomean", 1.01, last=64), False, "1.000"),
        (bench.Bar("gemm_fp8", "torch_row", "geomean", 1.25), True, "1.260"),
        (bench.Bar("gemm_fp8", "torch_row", "minimum", 0.93), False, "0.500"),
        (bench.Bar("gemm_fp8", "torch_row", "minimum", 0.5), True, "0.500"),
        (bench.Bar("gemm_fp8", "torch_row", "geomean", 1.0, first=1024), None, "not measured"),
        (bench.Bar("gemm_fp8", "vllm", "geomean", 1.0), None, "not measured"),
    ],
)
def test_judge(bar, passed, value):
    got, line = bench.judge(bar, ROWS)
    assert got is passed
    assert line.startswith({True: "pass", False: "MISS", None: "----"}[passed])
    assert value in line
    assert passed is None or bar.last or "worst of 3 0.500 at m=1 k=96 n=48" in line


def test_bars_are_about_what_is_measured_and_say_where():
    for bar in bench.BARS:
        family = bench.FAMILIES[bar.family]
        assert {*bar.peer.split(" or ")} <= {"best", "floor", *family.peers}
        assert bar.of in ("geomean", "minimum")
        assert any(bar.first <= m <= (bar.last or m) for m in family.m)
        assert any(bar.large in (None, k * n >= bench.LARGE) for k, n in family.kn)
    assert str(bench.Bar("gemm_fp8", "vllm", "geomean", 1.12, last=16)) == "geomean vs vllm, M <= 16, >= 1.12"
    assert str(bench.Bar("gemm_fp8", "vllm", "minimum", 0.9)) == "minimum vs vllm, all M, >= 0.90"
    assert "M >= 1024" in str(bench.Bar("gemm_fp8", "vllm", "geomean", 1, first=1024))
    assert "M = 256" in str(bench.Bar("gemm_fp8", "vllm", "geomean", 1, first=256, last=256))
    large, small = (str(bench.Bar("gemm_fp8", "floor", "minimum", 0.8, large=large)) for large in (True, False))
    assert large == "minimum vs floor, all M, weights of at least 50 M, >= 0.80"
    assert small == "minimum vs floor, all M, weights of less than 50 M, >= 0.80"


def test_summary():
    lines = bench.summary(FP8, ROWS)
    assert lines[2].split() == ["1", "50%", "1.00", "(0.50)", "1.50", "(1.50)", "-"]
    assert lines[3].split() == ["256", "2%", "2.00", "(2.00)", "-", "-"]
    assert lines[4] == "host time of an eager call: scaled_mm 4.0 µs, torch row-wise 6.0 µs"
    assert len(lines) == 5 + sum(bar.family == "gemm_fp8" for bar in bench.BARS)


# Results files and README.md


def save(folder, family="gemm_fp8", rows=ROWS):
    bench.write(folder / f"{family}.json", bench.dump(META, rows))


def test_results_are_json_with_a_line_a_row(tmp_path):
    save(tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()  # no temporary file is left
    assert json.loads(file.read_text()) == {"meta": META, "rows": ROWS}
    assert len(file.read_text().splitlines()) == len(ROWS) + 3


def test_tables_of_results_made_by_hand(tmp_path):
    save(tmp_path)
    readme = "# Title\n\n<!-- measured:begin -->\nold\n<!-- measured:end -->\n\nrest\n"
    text = bench.with_tables(readme, tmp_path)
    assert (
        text
        == f"""# Title

<!-- measured:begin -->
**{FP8.title}.** µs a call; in parentheses torch row-wise's time over ours. Means are geometric.

| k × n | M = 1 | M = 256 |
| --- | --: | --: |
| 64 × 48 | 4.0 (2.00) | 123 (2.00) |
| 96 × 48 | 4.0 (0.50) | - |
| mean, vs torch row-wise | 1.00 | 2.00 |
| mean, vs torch tensor-wise | 1.50 | - |
| mean, % of the floor | 50% | 2% |

Host time of an eager call: scaled_mm 4.0 µs, torch row-wise 6.0 µs.
Measured on one NVIDIA H200, driver 580.1, torch 2.11.0; 2026-12-01, commit abc.
<!-- measured:end -->

rest
"""
    )
    assert bench.with_tables(text, tmp_path) == text


def test_tables_without_results_or_marks(tmp_path):
    begin, end = bench.MARKS
    assert bench.with_tables(f"{begin}{end}", tmp_path) == f"{begin}\nNothing is measured yet.\n{end}"
    for readme in ("no marks", f"{end} {begin}", f"{begin} {begin} {end}"):
        with pytest.raises(ValueError, match="must hold"):
            bench.with_tables(readme, tmp_path)


CHECKOUT = Path(__file__).resolve().parent.parent


def test_readme_is_in_step_with_the_committed_results():
    readme = (CHECKOUT / "README.md").read_text()
    written = bench.with_tables(readme, CHECKOUT / "benchmarks" / "h200")
    assert written == readme, "run python tools/bench.py --tables"


def test_committed_results_have_what_a_row_needs():
    files = [path for name in bench.FAMILIES for path in (CHECKOUT / "benchmarks").glob(f"*/{name}.json")]
    assert files
    for path in files:
        found = json.loads(path.read_text())
        assert found["meta"].keys() >= META.keys(), path
        for row in found["rows"]:
            assert row.keys() >= {
                "op",
                "mode",
                "m",
                "n",
                "k",
                "kernel",
                "us",
                "floor_us",
                "tflops",
                "err",
                "peers",
            }
            assert 0 < row["us"] < math.inf and row["err"] <= bench.FAMILIES[path.stem].most, row
            assert row["peers"].keys() <= bench.FAMILIES[path.stem].peers.keys(), row


# Checking and timing, on a CPU with made-up times


@pytest.fixture
def on_cpu(monkeypatch):
    """What was asked for, as (candidates, rounds); the time of a candidate is its number of letters."""
    asked = []

    def samples(candidates, *, rounds, replay_ms=4.0):
        for calls in candidates.values():
            for call in calls:
                call()
        asked.append((list(candidates), rounds))
        return {name: [float(len(name) or 1)] * rounds for name in candidates}

    monkeypatch.setattr(testing, "interleaved_samples", samples)
    monkeypatch.setattr(testing, "input_sets", lambda nbytes, device: 3)
    monkeypatch.setattr(testing, "host_time", lambda fn, calls=1: (fn(), 5.0)[1])
    monkeypatch.setattr(bench, "HOST", 32)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return asked


def right(x, out):
    d = x.a.float() @ x.b.float() * x.scale_a * x.scale_b
    return d.bfloat16() if out is None else out.copy_(d)


def right_tensor_wise(x, out):
    return right(x._replace(scale_a=x.one_a, scale_b=x.one_b), out)


def raises(x, out):
    raise RuntimeError("n is 48\nand more")


def family_of(ours, **peers):
    return replace(FP8, ours=bench.Candidate("ours", ours), peers=peers)


@pytest.mark.parametrize("family", [FP8, BF16], ids=lambda family: family.name)
def test_error_of_what_is_right_is_the_rounding_of_the_result(on_cpu, family):
    shape = bench.Shape(family, 48, 64, (1, 40), device="cpu")
    for m in (1, 40):
        assert 0 < shape.error(bench.Candidate("", right), m) < 2.5e-3
    assert 0 < shape.error(bench.Candidate("", right_tensor_wise, tensor_wise=True), 40) < 2.5e-3
    assert shape.error(bench.Candidate("", right_tensor_wise), 40) > bench.MAX_ERROR


def test_error_sees_an_unwritten_row_and_a_second_call_that_is_wrong(on_cpu):
    def all_but_one_row(x, out):
        out[:7] = right(x, None)[:7]
        out[8:] = right(x, None)[8:]

    def second_is_wrong(x, out, calls=[]):  # noqa: B006
        calls.append(out)
        right(x, out)
        if len(calls) == 2:
            out[0] = 0

    shape = bench.Shape(FP8, 48, 64, (40,), device="cpu")
    assert 7 not in torch.linspace(0, 39, 16).round()  # the values of that row are not looked at
    assert shape.error(bench.Candidate("", all_but_one_row), 40) == math.inf
    assert shape.error(bench.Candidate("", second_is_wrong), 40) > bench.MAX_ERROR


def test_calls_rotate_over_inputs_and_results(on_cpu):
    seen = []
    shape = bench.Shape(BF16, 48, 64, (8, 16), device="cpu")
    for call in shape.calls(bench.Candidate("", lambda x, out: seen.append((x, out))), 8):
        call()
    assert len({x.a.data_ptr() for x, _ in seen}) == len({x.b.data_ptr() for x, _ in seen}) == len(seen) == 3
    assert seen[0][1].data_ptr() != seen[1][1].data_ptr() and seen[0][1].data_ptr() == seen[2][1].data_ptr()
    assert all(x.a.shape == (8, 64) and x.b.shape == (64, 48) and out.shape == (8, 48) for x, out in seen)


def test_half_of_the_rounds_run_in_the_opposite_order(on_cpu):
    assert bench.times({"a": [], "bb": [], "ccc": []}, rounds=7) == {"a": 1.0, "bb": 2.0, "ccc": 3.0}
    assert on_cpu == [(["a", "bb", "ccc"], 4), (["ccc", "bb", "a"], 4)]


def test_run_makes_rows_and_leaves_out_peers_that_fail(on_cpu, capsys):
    family = family_of(
        right,
        torch_row=bench.Candidate("row", right),
        torch_tensor=bench.Candidate("tensor", right_tensor_wise, tensor_wise=True, eager=False),
        wrong=bench.Candidate("wrong", right_tensor_wise),
        broken=bench.Candidate("broken", raises),
        vllm=bench.Candidate("vllm", raises),
    )
    rows, refused = bench.run(family, [(64, 48)], (1, 5), without=("vllm",), device="cpu")
    assert not refused
    assert [(row["m"], row["n"], row["k"]) for row in rows] == [(1, 48, 64), (5, 48, 64), (1, 32, 32)]
    first = rows[0]
    assert first["peers"] == {"torch_row": len("torch_row"), "torch_tensor": len("torch_tensor")}
    assert (first["us"], first["floor_us"]) == (1.0, 0.73)
    assert plan.Choice.parse(first["kernel"]) == plan.choose(bench.problem(FP8, 48, 64), 1)
    assert first["err"] < 3e-3
    assert "eager_us" not in first
    assert rows[2]["eager_us"] == 5.0 and rows[2]["peers_eager_us"] == {"torch_row": 5.0}
    out = capsys.readouterr().out
    assert "left out at m=1 n=48 k=64: broken: n is 48\n" in out
    assert "wrong: relative error is" in out
    assert "vllm" not in out
    json.dumps(rows)


@pytest.mark.parametrize("family", [FP8, BF16], ids=lambda family: family.name)
def test_run_of_the_real_candidates(on_cpu, family):
    rows, refused = bench.run(family, [(64, 48)], (1, 17), without=("vllm",), device="cpu")
    assert not refused
    assert [row["peers"].keys() for row in rows] == [family.peers.keys() - {"vllm"}] * 3
    assert rows[-1]["peers_eager_us"].keys() == rows[-1]["peers"].keys()
    shape, problem = bench.Shape(family, 48, 64, (17,), device="cpu"), bench.problem(family, 48, 64)
    for choice in plan.candidates(problem, 17):
        bench.refuse_wrong(shape, bench.forced(family, str(choice)), 17)
    with pytest.raises(ValueError, match="not a kernel"):
        bench.refuse_wrong(shape, bench.forced(family, "nothing"), 17)


@pytest.mark.parametrize("ours, why", [(right_tensor_wise, "relative error is"), (raises, "n is 48")])
def test_what_is_wrong_or_fails_is_not_timed(on_cpu, ours, why):
    rows, refused = bench.run(family_of(ours), [(64, 48)], (1, 5), device="cpu")
    assert rows == on_cpu == []
    assert [why in sentence for sentence in refused] == [True] * 3
    assert refused[0].startswith("scaled_mm m=1 n=48 k=64: ")


def test_check_times_nothing(on_cpu):
    rows, refused = bench.run(family_of(right), [(64, 48)], (5,), check_only=True, device="cpu")
    assert not refused and not on_cpu
    assert rows[0].keys() == {"op", "mode", "m", "n", "k", "kernel", "floor_us", "err"}


# gate_up in one launch

FUSED = bench.FAMILIES["gemm_fused"]


@pytest.fixture
def peers_on_cpu(monkeypatch):
    """DeepGEMM's and vLLM's ops, made of ours."""

    class DeepGemm:
        get_mn_major_tma_aligned_tensor = staticmethod(lambda scale: scale)

        @staticmethod
        def fp8_gemm_nt(a, weight, out):
            cutegemm.scaled_mm(a[0], weight[0].t(), a[1], weight[1], out=out)

    def silu_and_mul_per_block_quant(q, x, scale, group_size, scale_ub, transposed):
        for to, made in zip((q, scale), cutegemm.activation_quant(x, granularity="group"), strict=True):
            to.copy_(made)

    monkeypatch.setattr(bench, "_deep", lambda: DeepGemm)
    monkeypatch.setattr(torch.ops._C, "silu_and_mul_per_block_quant", silu_and_mul_per_block_quant, raising=False)


def test_fused_run_of_the_real_candidates(on_cpu, peers_on_cpu):
    rows, refused = bench.run(FUSED, [(256, 512)], (1, 3072), device="cpu")
    assert not refused
    assert [row["peers"].keys() for row in rows] == [FUSED.peers.keys()] * 3
    assert "gated" in rows[1]["kernel"]
    assert rows[-1]["kernel"] == "separate"  # the half of its n is no multiple of 64
    assert all(0 < row["err"] < 3e-2 for row in rows)
    assert rows[-1]["peers_eager_us"].keys() == {"separate"}
    problem = bench.problem(FUSED, 512, 256)
    shape, choices = bench.Shape(FUSED, 512, 256, (70,), device="cpu"), plan.candidates(problem, 70)
    assert choices
    for choice in choices:
        bench.refuse_wrong(shape, bench.forced(FUSED, str(choice)), 70)


def test_fused_bytes_by_hand(on_cpu):
    shape = bench.Shape(FUSED, 512, 256, (70,), device="cpu")
    scales = 70 * 2 + 4 * 2 + 70 * 2
    assert shape.bytes(70) == 70 * 256 + 512 * 256 + 70 * 256 + 4 * scales


def test_fused_results_that_are_wrong_are_seen(on_cpu):
    def ungated(x, out):
        q, scale = cutegemm.scaled_mm_quant(x.a, x.b, x.scale_a, x.scale_b)
        return q[:, :256], scale[:, :2]

    def unwritten(x, out):
        q, scale = bench._fused(x, out)
        scale[7] = math.nan
        return q, scale

    def second_is_wrong(x, out, calls=[]):  # noqa: B006
        calls.append(out)
        q, scale = bench._fused(x, out)
        return q, scale * (1.1 if len(calls) == 2 else 1)

    shape = bench.Shape(FUSED, 512, 256, (40,), device="cpu")
    assert shape.error(bench.Candidate("", unwritten), 40) == math.inf
    for call in (ungated, second_is_wrong):
        with pytest.raises(bench.WrongResult, match=r"it must be at most 0\.04"):
            bench.refuse_wrong(shape, bench.Candidate("", call), 40)


def test_fused_bar_is_a_share_of_the_best_peer_for_many_tokens():
    (bar,) = (bar for bar in bench.BARS if bar.family == "gemm_fused")
    rows = [row(64, 9.0, separate=9.0), row(1024, 8.0, separate=11.0, vllm=10.0), row(2048, 8.0, separate=10.1)]
    assert bench.judge(bar, rows) == (
        True,
        "pass  gemm_fused: minimum vs best, M >= 1024, >= 1.25: 1.250 (worst of 2 1.250 at m=1024 k=64 n=48)",
    )
    assert bench.summary(FUSED, [*rows, row(4096, 8.0, separate=9.9)])[-1].startswith("MISS  gemm_fused")
    assert bench.judge(bar, rows[:1])[0] is None
    assert "in parentheses scaled_mm + activation_quant's time over ours" in bench.markdown(FUSED, META, rows)


# Weights of few bits

W4, W4_ZEROS, W4_SM80, W8, W8_INT8 = (
    bench.FAMILIES[f"gemm_{name}"] for name in ("w4a16", "w4a16_zeros", "w4a16_sm80", "w8a16", "w8a16_int8")
)


@pytest.fixture
def vllm_on_cpu(monkeypatch):
    """Machete and Marlin by the layouts that they take."""

    def product(a, codes, scales, group_size):
        nibbles = torch.stack([codes >> 4 * i & 15 for i in range(8)], -1).flatten(1)  # of (n, k / 8)
        return (a.float() @ ((nibbles - 8) * scales.t().repeat_interleave(group_size, 1).float()).t()).bfloat16()

    def machete_prepack_B(codes, a_type, b_type, scales_type):
        assert codes.dtype == torch.int32 and codes.t().is_contiguous() and b_type == weights.UINT4B8
        assert a_type == scales_type == torch.bfloat16
        return codes.t()

    def machete_mm(a, w, b_type, out_type, scales, zeros, group_size, *scales_of_rows_and_schedule):
        assert (out_type, zeros, scales_of_rows_and_schedule) == (None, None, (None,) * 3)
        assert scales.is_contiguous() and b_type == weights.UINT4B8
        return product(a, w, scales, group_size)

    def gptq_marlin_repack(codes, permutation, k, n, bits, is_a_8bit):
        assert codes.shape == (k // 8, n) and codes.is_contiguous() and (bits, is_a_8bit) == (4, False)
        assert permutation.dtype == torch.int32 and not len(permutation)
        return codes

    def marlin_gemm(a, c, w, bias, scales, *rest):
        *nothing, workspace, b_type, m, n, k, k_full, atomic_add, fp32_reduce, zp_float = rest
        assert (c, bias, nothing) == (None, None, [None] * 5) and b_type == weights.UINT4B8
        assert (k_full, atomic_add, fp32_reduce, zp_float) == (True, False, True, False)
        assert workspace.dtype == torch.int32 and len(workspace) >= 132 and not workspace.any()
        assert a.shape == (m, k) and scales.is_contiguous()
        # Of 64 scales, i is where 8 * (i % 8) + i // 8 is wanted: a transposed square.
        return product(a, w.t(), scales.view(-1, 8, 8).transpose(1, 2).reshape(-1, n), k // len(scales))

    for op in (machete_prepack_B, machete_mm, gptq_marlin_repack, marlin_gemm):
        monkeypatch.setattr(torch.ops._C, op.__name__, op, raising=False)
    monkeypatch.setattr(bench, "HOST", 128)


@pytest.mark.parametrize("family", [W4, W4_ZEROS, W8, W8_INT8], ids=lambda family: family.name)
def test_weight_run_of_the_real_candidates(on_cpu, vllm_on_cpu, family):
    rows, refused = bench.run(family, [(256, 384)], (1, 17), device="cpu")
    assert not refused
    assert [row["peers"].keys() for row in rows] == [family.peers.keys()] * 3
    assert rows[-1]["peers_eager_us"].keys() == family.peers.keys()
    assert all(0 < row["err"] < 2.5e-3 for row in rows)
    problem = bench.problem(family, 384, 256)
    assert [row["kernel"] for row in rows[:2]] == [str(plan.choose(problem, m)) for m in (1, 17)]
    shape = bench.Shape(family, 384, 256, (17,), device="cpu")
    assert all(0 < shape.error(peer, 17) < 4e-3 for peer in family.peers.values())
    for choice in plan.candidates(problem, 17):
        bench.refuse_wrong(shape, bench.forced(family, str(choice)), 17)
    with pytest.raises(ValueError, match="not a kernel"):
        bench.refuse_wrong(shape, bench.forced(family, "nothing"), 17)


def test_weight_peers_that_do_not_take_a_shape_are_left_out(on_cpu, vllm_on_cpu, capsys):
    rows, refused = bench.run(W4, [(128, 64)], (1,), device="cpu")
    assert not refused and rows[0]["peers"].keys() == {"torch_mm", "marlin"}
    assert (
        "left out at m=1 n=64 k=128: machete: machete: n is 64; it must be a multiple of 128" in capsys.readouterr().out
    )


def test_weights_are_packed_once_for_each_input_set_and_candidate(on_cpu):
    seen = []

    def pack(x):
        seen.append(x)
        return weights.for_torch(x)

    shape = bench.Shape(W4, 48, 64, (1, 5), device="cpu")
    candidate = bench.Candidate("packs", weights.torch_mm, pack=pack)
    for m in (1, 5):
        bench.refuse_wrong(shape, candidate, m)
    assert len(seen) == 3 and len({x.w[0].packed.data_ptr() for x in seen}) == 3
    assert len({x.a.data_ptr() for x in seen}) == 3


def test_weight_bytes_by_hand(on_cpu):
    def nbytes(family):
        return bench.Shape(family, 64, 256, (5,), device="cpu").bytes(5) - (5 * 256 + 5 * 64) * 2

    assert nbytes(W4) == nbytes(W4_SM80) == 64 * 256 // 2 + 64 * 2 * 2
    assert nbytes(W4_ZEROS) == 64 * 256 // 2 + 2 * 64 * 4 * 2
    assert nbytes(W8) == nbytes(W8_INT8) == 64 * 256 + 64 * 4


def test_weight_results_that_are_wrong_are_seen(on_cpu):
    def makes(x, out, factor):
        return weights.w4a16_mm(x, None) * factor

    def nothing(x, out):
        weights.w4a16_mm(x, None)

    shape = bench.Shape(W4, 48, 64, (5,), device="cpu")
    assert shape.error(bench.Candidate("", partial(makes, factor=1)), 5) < 2.5e-3
    assert shape.error(bench.Candidate("", partial(makes, factor=1.02)), 5) > bench.MAX_ERROR
    assert shape.error(bench.Candidate("", nothing), 5) == math.inf  # what it was to write is not written


@pytest.mark.parametrize("family", [W4, W4_ZEROS, W8, W8_INT8], ids=lambda family: family.name)
def test_weight_problems_are_those_of_calls(family):
    named = {"dtype": family.weight.dtype} if family.op == "w8a16_mm" else {"group_size": family.weight.group_size}
    for k, n in ((4096, 6144), (7168, 2112)):
        problem = bench.problem(family, n, k)
        for m in (1, 64, 1024):
            assert plan.explain(family.op, n, k, m, **named).endswith(f" {plan.choose(problem, m)}")


def test_of_kernels_for_sm80_the_best_at_a_glance_is_timed(on_cpu, vllm_on_cpu, monkeypatch):
    glanced = []

    def time_interleaved(calls, *, rounds, replay_ms):
        glanced.append(list(calls))
        return {name: float(-i) for i, name in enumerate(calls)}

    monkeypatch.setattr(testing, "time_interleaved", time_interleaved)
    rows, refused = bench.run(W4_SM80, [(256, 384)], (1, 64), device="cpu")
    assert not refused and len(rows) == 2  # and no host times, which would be those of calls without kernel=
    problem = replace(bench.problem(W4, 384, 256), hopper=False)
    for found, names in zip(rows, glanced, strict=True):
        assert names == [str(choice) for choice in plan.candidates(problem, found["m"])]
        assert len(names) > 1 and all("_sm80_" in name for name in names)
        assert found["kernel"] == names[-1] and found["us"] == 1.0 and found["peers"].keys() == {"marlin"}
    assert bench.run(W4_SM80, [(256, 384)], (1,), check_only=True, device="cpu")[0][0]["kernel"] == glanced[0][0]
    assert len(glanced) == 2
    (bar,) = (bar for bar in bench.BARS if bar.family == W4_SM80.name)
    assert bench.judge(bar, [row(1, 8.0, marlin=8.0), row(64, 8.0, marlin=7.9)])[0] is False
    assert W4_SM80.name not in tune.FAMILIES and W4.name in tune.FAMILIES


def test_a_kernel_for_sm80_that_is_wrong_is_not_timed(on_cpu, monkeypatch):
    def forced(family, name):
        return bench.Candidate(name, partial(weights.w4a16_mm) if "64x8" in name else raises)

    monkeypatch.setattr(bench, "forced", forced)
    rows, refused = bench.run(W4_SM80, [(64, 48)], (1,), device="cpu")
    assert rows == on_cpu == [] and len(refused) == 1


# The command line


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def test_main_writes_whole_runs_and_prints_parts(monkeypatch, tmp_path, capsys, with_gpu):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(
        bench, "run", lambda family, *args: (ROWS[:0], ["m=1: wrong"]) if family is BF16 else (ROWS, [])
    )
    assert bench.main(["gemm_fp8", "--m", "1,16"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert bench.main(["gemm_fp8", "--commit", "abc"]) == 0
    found = json.loads((tmp_path / "benchmarks" / "h200" / "gemm_fp8.json").read_text())
    assert found["rows"] == ROWS
    assert found["meta"]["gpu"] == "NVIDIA H200" and found["meta"]["commit"] == "abc"
    assert bench.main(["gemm_bf16", "--nk", "48x64", "--out", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out" / "gemm_bf16.json").exists()
    assert "REFUSED m=1: wrong" in capsys.readouterr().out


def test_a_run_that_is_cut_off_leaves_the_shapes_before(monkeypatch, tmp_path, on_cpu, with_gpu):
    measured = []

    def measure(shape, m, *_):
        if shape.n == 80:
            raise KeyboardInterrupt
        measured.append({"op": "mm", "m": m, "n": shape.n, "k": shape.k})
        return measured[-1]

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "Shape", lambda family, n, k, ms, device: argparse.Namespace(n=n, k=k))
    monkeypatch.setattr(bench, "line", str)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["gemm_bf16", "--nk", "48x64,80x64", "--m", "1,5", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "gemm_bf16.json").read_text())["rows"] == measured != []


def test_main_says_what_it_can_not_do(capsys, tmp_path, with_gpu, monkeypatch):
    for argv, why in ((["gemm"], "gemm is not a family"), (["--peers", str(tmp_path)], "has no _C.abi3.so")):
        with pytest.raises(SystemExit):
            bench.main(argv)
        assert why in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.main([])
    assert "there is no GPU" in capsys.readouterr().err


def test_nk_is_n_by_k():
    assert bench.nk_pairs("6144x4096,8x16") == ((4096, 6144), (16, 8))
    assert bench.slug("NVIDIA H200") == "h200" and bench.slug("NVIDIA H100 PCIe") == "h100_pcie"


def test_commit_tells_whether_what_is_measured_differs_from_it(monkeypatch, tmp_path, with_gpu):
    git = shutil.which("git")
    assert git

    def run(*command):
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run((git, *identity, *command), cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert bench.metadata()["commit"] == "unknown"
    for name in ("kernel.cu", "README.md", "benchmarks/x.json"):
        bench.write(tmp_path / name, "old")
    run("init")
    run("add", ".")
    run("commit", "-m", "m")
    commit = bench.metadata()["commit"]
    assert len(commit) == 12
    bench.write(tmp_path / "README.md", "new")
    bench.write(tmp_path / "benchmarks/x.json", "new")
    assert bench.metadata()["commit"] == commit
    bench.write(tmp_path / "kernel.cu", "new")
    assert bench.metadata()["commit"] == commit + "+dirty"


# The tuner


@pytest.fixture
def tuning(on_cpu, monkeypatch):
    """Kernels by name: k<number> takes that many us, others are refused or wrong."""

    def us(name):
        return float(name[1:].partition(":")[0])

    def forced(family, name):
        return bench.Candidate(name, {"r": raises, "w": right_tensor_wise}.get(name[0], right))

    def time_interleaved(calls, *, rounds, replay_ms):
        on_cpu.append((list(calls), rounds))
        return {name: us(name) for name in calls}

    def shape_on_cpu(*args):
        return made(*args, device="cpu")

    made = bench.Shape
    monkeypatch.setattr(bench, "Shape", shape_on_cpu)
    monkeypatch.setattr(bench, "forced", forced)
    monkeypatch.setattr(tune, "DECLARED", tune.DECLARED | {choice.kernel for choice in CHOICES})
    monkeypatch.setattr(tune, "glance", lambda calls: us(calls[0].__closure__[0].cell_contents.title))
    monkeypatch.setattr(testing, "time_interleaved", time_interleaved)
    return on_cpu


CHOICES = [plan.Choice(f"k{us}") for us in (9, 3, 8, 4, 7, 5, 155)]
CHOICES += [plan.Choice("k4", plan.Options(split=split)) for split in (2, 3, 4)]
CHOICES += [
    plan.Choice("k6", plan.Options(split=2, prefetch=64)),
    plan.Choice("refuses", plan.Options(split=3)),
    plan.Choice("refuses"),
    plan.Choice("wrong"),
]


def test_survey_takes_a_closer_look_at_the_best(tuning, capsys):
    faults: Counter[str] = Counter()
    best = tune.survey(bench.Shape(FP8, 48, 64, (5,)), 5, CHOICES, faults)
    assert [row["us"] for row in best] == [3, 4, 4, 4, 5, 6]  # of k4 three of four
    assert best[0] == {"kernel": "k3", "us": 3.0}
    assert best[5] == {"kernel": "k6", "split": 2, "prefetch": 64, "us": 6.0}
    (everyone, few), (finalists, more) = tuning
    assert "k9" in everyone and "k155" not in everyone  # over 1.5 * 3 + 150
    assert len(finalists) == tune.KEPT and few < more
    assert faults == {"n is 48": 2, "WRONG wrong": 1}
    assert "WRONG at m=5 n=48 k=64: wrong: relative error is" in capsys.readouterr().out


def test_survey_of_kernels_that_all_refuse(tuning):
    assert tune.survey(bench.Shape(FP8, 48, 64, (5,)), 5, [plan.Choice("refuses")], Counter()) == []


def test_merge_replaces_the_rows_of_the_same_problem():
    def made(m, us, k=64):
        problem = {"op": "mm", "a": "bf16", "b": "bf16", "d": "bf16", "fast_accum": False, "n": 48}
        return {**problem, "k": k, "m": m, "best": [{"us": us}]}

    rows = tune.merge([made(16, 1), made(8, 2), made(8, 3, k=32)], [made(16, 4), made(1, 5)])
    found = [(row["k"], row["m"], row["best"][0]["us"]) for row in rows]
    assert found == [(32, 8, 3), (64, 1, 5), (64, 8, 2), (64, 16, 4)]


def test_tune_writes_a_table(tuning, monkeypatch, tmp_path, with_gpu, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(plan, "candidates", lambda problem, m: CHOICES[:3])
    assert tune.main(["gemm_fp8", "--nk", "48x64", "--m", "1,5"]) == 0
    assert tune.main(["gemm_bf16", "--nk", "48x64", "--m", "5"]) == 0
    found = json.loads((tmp_path / "cutegemm" / "tuned" / "NVIDIA_H200.json").read_text())
    assert [(*plan.tuned_by(row), row["m"]) for row in found["rows"]] == [
        ("mm", "bf16", "bf16", "bf16", False, "", False, 48, 64, 5),
        ("scaled_mm", "e4m3", "e4m3", "bf16", True, "", False, 48, 64, 1),
        ("scaled_mm", "e4m3", "e4m3", "bf16", True, "", False, 48, 64, 5),
    ]
    assert [entry["kernel"] for entry in found["rows"][0]["best"]] == ["k3", "k8", "k9"]
    assert found["meta"].keys() >= {"gpu", "driver", "torch", "date", "commit"}
    # What is not measured again stays as it was, of the commit that it was measured at.
    assert tune.main(["gemm_fp8", "--nk", "48x64", "--m", "5", "--commit", "new"]) == 0
    table = tmp_path / "cutegemm" / "tuned" / "NVIDIA_H200.json"
    before, found = found, json.loads(table.read_text())
    assert found["rows"] == [*before["rows"][:2], {**before["rows"][2], "commit": "new"}]
    # Another file starts from the rows of the table.
    assert tune.main(["gemm_bf16", "--nk", "48x64", "--m", "7", "--out", str(tmp_path / "new.json")]) == 0
    assert len(json.loads((tmp_path / "new.json").read_text())["rows"]) == 4
    assert "gemm_fp8 m=1 n=48 k=64: [{'kernel': 'k3', 'us': 3.0}]" in capsys.readouterr().out
    # A problem that nothing takes keeps the row of before, and the run fails.
    monkeypatch.setattr(plan, "candidates", lambda problem, m: [plan.Choice("refuses")])
    assert tune.main(["gemm_bf16", "--nk", "48x64", "--m", "5"]) == 1
    assert json.loads(table.read_text())["rows"] == found["rows"]
    assert "WRONG no kernel for gemm_bf16 m=5 n=48 k=64" in capsys.readouterr().out
    # A kernel that is no longer declared leaves the table, whichever problem is measured.
    monkeypatch.setattr(tune, "DECLARED", tune.DECLARED - {"k8"})
    assert tune.main(["gemm_bf16", "--nk", "48x64", "--m", "5"]) == 1
    assert [entry["kernel"] for entry in json.loads(table.read_text())["rows"][-1]["best"]] == ["k3", "k9"]


def test_plans_follow_a_table_that_was_tuned(tuning, monkeypatch, tmp_path, with_gpu):
    """The file that tune writes is the file that plan reads, and the tuned m takes the fastest kernel."""
    problem = bench.problem(FP8, 48, 64)
    slowest = max(plan.candidates(problem, 5), key=lambda choice: plan.cost(problem, choice, 5))
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "cutegemm" / "plan.py"))
    monkeypatch.setattr(tune, "survey", lambda *args: [{"kernel": slowest.kernel, **vars(slowest.options), "us": 1}])
    plan._table.cache_clear()
    try:
        assert plan.choose(problem, 5) != slowest
        plan._table.cache_clear()
        assert tune.main(["gemm_fp8", "--nk", "48x64", "--m", "5"]) == 0
        assert plan.choose(problem, 5) == slowest
        assert "measured at m = 5" in plan.explain("scaled_mm", 48, 64)
    finally:
        plan._table.cache_clear()


@pytest.mark.parametrize("family", [W4, W4_ZEROS, W8_INT8], ids=lambda family: family.name)
def test_explain_shows_what_was_tuned_for_a_weight_of_few_bits(tuning, monkeypatch, tmp_path, with_gpu, family):
    problem = bench.problem(family, 48, 64)
    slowest = max(plan.candidates(problem, 5), key=lambda choice: plan.cost(problem, choice, 5))
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "cutegemm" / "plan.py"))
    monkeypatch.setattr(tune, "survey", lambda *args: [{"kernel": slowest.kernel, **vars(slowest.options), "us": 1}])
    plan._table.cache_clear()
    try:
        assert tune.main([family.name, "--nk", "48x64", "--m", "5"]) == 0
        named = {"dtype": torch.int8} if family is W8_INT8 else {"group_size": family.weight.group_size}
        text = plan.explain(family.op, 48, 64, 5, **named)
        assert "measured at m = 5" in text and text.endswith(f" {slowest}")
        # Other GPUs have a plan without what they can't run.
        assert "_sm80_" in plan.choose(replace(problem, hopper=False), 5).kernel
    finally:
        plan._table.cache_clear()


# The figure


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [
        ({1: 1.0, 100: 100.0}, {1: 10.0, 100: 10.0}, [10.0]),
        ({1: 1.0, 100: 100.0}, {1: 10.0, 4: 10.0, 100: 10.0}, [10.0]),  # points between those of the other
        ({1: 1.0, 16: 16.0, 64: 16.0}, {2: 8.0, 32: 8.0}, [8.0]),  # only where both have points around it
        ({1: 4.0, 4: 16.0, 16: 4.0, 64: 16.0}, {1: 8.0, 64: 8.0}, [2.0, 8.0, 32.0]),
        ({1: 1.0, 10: 5.0, 100: 9.0}, {1: 2.0, 10: 5.0, 100: 7.0}, [10.0]),  # at a point
        ({1: 1.0, 10: 5.0, 100: 7.0}, {1: 2.0, 10: 5.05, 100: 6.95}, []),  # in the end as fast as the other
        ({1: 1.0, 4: 4.0, 16: 4.04, 64: 3.96, 99: 9.0}, {1: 2.0, 4: 4.0, 16: 4.0, 64: 4.0, 99: 4.0}, [4.0]),
        ({1: 1.0, 10: 1.0}, {1: 1.0, 10: 1.0}, []),
        ({1: 1.0, 10: 1.0}, {1: 2.0, 10: 2.0}, []),
        ({1: 1.0, 10: 1.0}, {20: 2.0, 40: 0.5}, []),
        ({}, {1: 1.0}, []),
    ],
)
def test_crossovers_by_hand(one, other, at):
    assert figure.crossovers(one, other) == pytest.approx(at)
    assert figure.crossovers(other, one) == pytest.approx(at)


def test_floors_of_formats_by_hand():
    n, k = 28672, 4096
    flops = 2 * 8192 * n * k
    assert figure.W4A16.floor(8192, n, k) == figure.FORMATS["BF16"].floor(8192, n, k) == pytest.approx(flops / 778e6)
    assert figure.FORMATS["FP8"].floor(8192, n, k) == pytest.approx(flops / 1514e6)
    assert figure.W4A16.floor(1, n, k) == roofline.read_floor_us(n * k / 2 + n * k / 128 * 2 + (n + k) * 2)
    assert figure.FORMATS["FP8"].floor(1, n, k) == roofline.read_floor_us(n * k + 4 * (n + 1) + k + 2 * n)
    # W4A16 does 2 m n k FLOPs in the time that BF16's bytes take.
    met = figure.floors_meet("BF16", n, k)
    assert met is not None and met == pytest.approx(778e6 * 60 / (2 * n * k), rel=0.05)
    assert figure.floors_meet("W4A16", n, k) == 1


def save_curves(folder):
    def made(us, m, **peers):
        return row(m, us, k=4096, n=28672, **peers)

    save(folder, "gemm_w4a16", [made(10.0, 1, torch_mm=40.0), made(160.0, 256, torch_mm=80.0), row(1, 1.0, k=7, n=7)])
    save(folder, "gemm_fp8", [made(20.0, 1), made(40.0, 256)])


def test_figure_of_results_made_by_hand(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    results = tmp_path / "benchmarks" / "h200"
    save_curves(results)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    begin, end = figure.MARKS
    (tmp_path / "README.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert figure.main([]) == 0
    assert (results / "w4a16.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(f"before\n{begin}\n![") and text.endswith(f"\n{end}\nafter\n")
    # log2: 10 to 160 us in 8 doublings of M, 40 to 80 in as many, and 20 to 40.
    bf16, fp8 = 256 ** (2 / 3), 256 ** (1 / 3)
    meet = [figure.floors_meet(each, 28672, 4096) for each in figure.OTHERS]
    assert f"| 4096 × 28672 | BF16 | {bf16:.0f} | {meet[0]} |\n| 4096 × 28672 | FP8 | {fp8:.0f} | {meet[1]} |" in text
    assert "14336" not in text and "of commit abc" in text
    floors = [bench.microseconds(figure.FORMATS["FP8"].floor(m, 28672, 4096)) for m in (1, 256)]
    assert "| 4096 × 28672, µs (floor) | M = 1 | M = 256 |\n| --- | --: | --: |\n| W4A16 | 10.0 (" in text
    assert f"| FP8 | 20.0 ({floors[0]}) | 40.0 ({floors[1]}) |\n\n| k × n |" in text
    # Of other results the table is printed.
    save_curves(tmp_path / "new")
    assert figure.main([str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "w4a16.png").exists()
    assert f"| {bf16:.0f} | {meet[0]} |" in capsys.readouterr().out
    assert (tmp_path / "README.md").read_text() == text


def test_figure_without_results(tmp_path, capsys):
    assert figure.table({}) == "Nothing is measured yet."
    for rows in ([], [row(1, 1.0, k=7, n=7, torch_mm=2.0)]):
        save(tmp_path, "gemm_w4a16", rows)
        with pytest.raises(SystemExit):
            figure.main([str(tmp_path)])
        assert "has no gemm_w4a16.json with a weight of k × n = 4096 × 28672 or 14336 × 4096" in capsys.readouterr().err


def test_readme_is_in_step_with_the_committed_crossovers():
    readme = (CHECKOUT / "README.md").read_text()
    assert figure.with_table(readme, CHECKOUT / "benchmarks" / "h200") == readme, "run python tools/figure.py"


# The ops on rows


def row_result(op="rms_norm", tokens=8192, us=30.0, width=4096, **peers):
    shape = {"tokens": tokens, "width": width}
    return {"op": op, "mode": "", "shape": shape, "us": us, "floor_us": 27.0, "bytes": 1, "peers": peers}


def test_row_bars_are_times_at_8192_tokens_and_the_best_peer_anywhere() -> None:
    rows = [row_result(us=34.0, vllm=36.0), row_result(tokens=1, us=2.0, vllm=2.5, compile=1.9)]
    time, slower = row_ops.judge(rows)
    assert time == "pass  rows: rms_norm: 34.00 us at 8192 tokens, <= 34"
    assert slower.startswith("MISS  rows: slower than compile, 1.90 us: rms_norm")
    assert row_ops.judge([row_result(us=34.1)])[0].startswith("MISS")
    assert row_ops.judge(rows[:1])[1] == "pass  rows: no peer is faster at any number of tokens"
    again = rows[0] | {"again": {"us": 34.2, "peers": {"vllm": 34.1}}}
    assert [line[:4] for line in row_ops.judge([again])] == ["pass", "MISS", "MISS"]
    chain = row_result(row_ops.CHAIN, 1, 40.0, unchained=39.0)
    assert row_ops.judge([*rows, chain]) == row_ops.judge(rows)


def test_row_bars_are_not_passed_by_what_was_not_measured() -> None:
    chain = row_result(row_ops.CHAIN, 1, 40.0, unchained=39.0)
    for rows in ([], [chain], [row_result()], [row_result(tokens=1, us=2.0)]):
        assert not [line for line in row_ops.judge(rows) if line.startswith("pass") and "peer" in line]
    assert not [line for line in row_ops.judge([]) if line.startswith("pass")]
    # A row without peers takes nothing from one that has them.
    lines = row_ops.judge([row_result(), row_result(tokens=1, us=2.0, vllm=2.5)])
    assert [line[:4] for line in lines] == ["pass", "pass"]


def test_row_table_by_hand() -> None:
    rows = [
        row_result(vllm=36.0, compile=39.0),
        row_result(tokens=1, us=2.0),
        row_result(row_ops.CHAIN, 1, unchained=40.0),
    ]
    meta = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "date": "d", "commit": "c", "peers": {"vllm": "0.20.0"}}
    text = row_ops.markdown(meta, rows)
    assert "| op | T = 1 | T = 8192 |" in text
    assert "| `rms_norm`, 4096 | 2.0 | 30.0 (1.20) |" in text
    assert "with and without programmatic dependent launch: T = 1: 30.0 and 40.0 µs." in text
    assert text.endswith("Measured on one NVIDIA H200, driver 1, torch 2, vllm 0.20.0; d, commit c.")


@pytest.mark.parametrize("row_op", row_ops.OPS, ids=lambda timed_op: f"{timed_op.op}-{timed_op.mode}-{timed_op.width}")
def test_row_candidates_make_the_same(row_op: row_ops.RowOp) -> None:
    def inputs() -> row_ops.Inputs:
        x, residual = torch.randn(2, 3, row_op.width * (2 if row_op.gated else 1)).bfloat16()
        return row_ops.Inputs(x, residual, torch.ones(row_op.width).bfloat16(), torch.tensor([0.03]))

    torch.manual_seed(0)
    assert row_ops.error(row_op, inputs()) < 1e-3
    wrong = replace(row_op, plain=lambda x, *rest: row_op.plain(2 * x, *rest))
    if row_op.op.startswith(("quantize", "silu")):
        assert row_ops.error(wrong, inputs()) > timed.MAX_ERROR


@pytest.mark.parametrize(("fault", "refused"), [(0.039, 0), (0.041, 1), (math.nan, 1)])
def test_ops_that_are_wrong_are_refused_and_not_timed(fault: float, refused: int, capsys) -> None:
    timed_ops = []

    class Op:
        op, mode, width, bars = "twice", "", 8, {}

        def nbytes(self, tokens: int) -> int:
            return tokens

        def calls(self, tokens: int, peers: object, device: str = "cuda") -> tuple[dict[str, timed.Calls], float]:
            return {"": []}, fault

    def times(candidates: dict[str, timed.Calls], rounds: int) -> dict[str, float]:
        timed_ops.append(candidates)
        return {"": 1.0}

    rows, sentences = timed.run([Op()], times, tokens=[4])
    assert (len(rows), len(sentences), len(timed_ops)) == ((0, 2, 0) if refused else (1, 0, 2))
    if refused:
        assert sentences[0] == f"twice, 8, tokens=4: relative error is {fault:.3g}; it must be at most 0.04"


# The ops on heads


@pytest.mark.parametrize("tokens", [1, 3, 130])
@pytest.mark.parametrize("head_op", head_ops.OPS, ids=lambda head_op: f"{head_op.op}-{head_op.mode}")
def test_head_candidates_make_the_same(head_op: head_ops.HeadOp, tokens: int, monkeypatch) -> None:
    monkeypatch.setattr(head_ops, "LENGTH", 2048)
    head_ops._table.cache_clear()
    try:
        inputs = head_op.inputs(tokens, "cpu")
        assert len(inputs.slots.unique()) == len(inputs.slots) == len(inputs.qkv) == len(inputs.positions) == tokens
        assert head_ops.error(head_op, inputs) < 5e-3
        wrong = replace(head_op, plain=lambda i: (i.qkv.mul_(2), head_op.plain(i)))
        assert head_ops.error(wrong, inputs) > timed.MAX_ERROR
    finally:
        head_ops._table.cache_clear()


def test_head_bars_and_the_one_launch() -> None:
    def result(op: str, tokens: int, us: float) -> timed.Row:
        shape = {"tokens": tokens, "width": head_ops.Q + head_ops.KV}
        return {"op": op, "mode": "", "shape": shape, "us": us, "floor_us": 1.0, "bytes": 1, "peers": {}}

    rows = [result("qk_norm_rope_", 1, 2.0), result(head_ops.FUSED, 1, 2.4), result("qk_norm_rope_", 8192, 48.1)]
    assert [line[:4] for line in head_ops.judge(rows)] == ["pass", "MISS", "pass"]
    assert head_ops.judge([rows[0], result(head_ops.FUSED, 1, 2.5)])[-1].startswith("MISS")
