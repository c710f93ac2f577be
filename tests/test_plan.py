"""Plans: every problem has a kernel for every m, and what Python and the dispatcher tell each other has one layout."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegemm import explain, gemm, library, plan
from cutegemm.plan import NO_LIMIT, Choice, Options, Problem, candidates, choose
from cutegemm.variants import DECLARED, KERNELS, SEPARATE, STEPS, AnyShape, Blockwise, Decode, MixedInput, Sm80

HALF = ("bf16", "fp16")
PAIRS = {
    "mm": [("bf16", "bf16"), ("fp16", "fp16")],
    "scaled_mm": [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("int8", "int8")],
}
TUNED = sorted((Path(plan.__file__).parent / "tuned").glob("*.json"))


def kinds() -> Iterator[dict[str, Any]]:
    """Every problem that the dispatcher can ask for, but for n and k."""
    for op, pairs in PAIRS.items():
        layouts = ("tn", "nn", "") if op == "scaled_mm" else ("tn", "tt", "nt", "nn", "")
        fast = (False, True) if op == "scaled_mm" else (False,)
        names = ("op", "a", "b", "d", "layout", "fast_accum", "aligned", "aligned_out")
        flags = itertools.product(("bf16", "fp16", "fp32"), layouts, fast, (False, True), (False, True))
        for pair, rest in itertools.product(pairs, flags):
            kind = dict(zip(names, (op, *pair, *rest), strict=True))
            yield kind
            if op == "scaled_mm" and pair != ("int8", "int8") and not kind["fast_accum"]:
                yield from (kind | {"scales": scales} for scales in ("block", "group"))
    weights = [("w4a16_mm", "int4", scales) for scales in STEPS]
    weights += [("w8a16_mm", b, scales) for b in ("e4m3", "int8") for scales in ("", "block")]
    for (op, b, scales), a, d, hopper in itertools.product(weights, HALF, (*HALF, "fp32"), (True, False)):
        yield {"op": op, "a": a, "b": b, "d": d, "scales": scales, "hopper": hopper}


KINDS = list(kinds())
SHAPES = [(4096, 4096), (1, 1), (24, 0), (1001, 77), (130, 8208), (65536, 16)]


def is_any(choice: Choice) -> bool:
    return isinstance(KERNELS[choice.kernel].tile, AnyShape)


def check(problem: Problem, device: str = plan.H200) -> None:
    rows = plan.plan(problem, device)
    limits = [row.m_limit for row in rows]
    assert limits == sorted(set(limits))
    assert limits[0] >= 1 and limits[-1] == NO_LIMIT
    for first, row in zip([1, *(limit + 1 for limit in limits)], rows, strict=False):
        for m in (first, (first + row.m_limit) // 2, row.m_limit):
            assert problem.allows(row.choice, m), f"m = {m}: {row.choice}"
            assert choose(problem, m, device) == row.choice
        # "any" is many times slower, so it is for what no other takes.
        assert problem.fused or is_any(row.choice) == all(
            isinstance(each.tile, AnyShape) for each in problem.kernels(first)
        )
    for row, after in itertools.pairwise(rows):
        assert row.choice != after.choice


# Plans


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_problem_has_a_kernel_for_every_m(n: int, k: int) -> None:
    for kind in KINDS:
        problem = Problem(n=n, k=k, **kind)
        for m in (1, 8, 9, 100, 10_000, NO_LIMIT - 1):
            assert candidates(problem, m)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plans_of_common_problems_are_whole(n: int, k: int) -> None:
    for kind in KINDS[::7]:
        check(Problem(n=n, k=k, **kind))
    for a, b in itertools.chain(*PAIRS.values()):
        fp8 = a in ("e4m3", "e5m2")
        check(Problem("scaled_mm" if fp8 or a == "int8" else "mm", a, b, "bf16", n, k, fast_accum=fp8))


@settings(max_examples=60)
@given(kind=st.sampled_from(KINDS), n=st.integers(1, 2**18), k=st.integers(0, 2**16))
def test_plans_are_whole(kind: dict[str, Any], n: int, k: int) -> None:
    check(Problem(n=n, k=k, **kind))


@settings(max_examples=200)
@given(
    kind=st.sampled_from(KINDS), n=st.integers(1, 2**31 - 2), k=st.integers(0, 2**31 - 2), m=st.integers(1, 2**31 - 2)
)
def test_candidates_take_the_problem_and_have_a_cost(kind: dict[str, Any], n: int, k: int, m: int) -> None:
    problem = Problem(n=n, k=k, **kind)
    choices = candidates(problem, m)
    assert choices
    assert len(set(choices)) == len(choices)
    for choice in choices:
        assert problem.takes(KERNELS[choice.kernel], m)
        assert 0 < plan.cost(problem, choice, m) < float("inf")


def test_folded_tiles_are_for_whole_boxes_of_a_weight_that_fits_the_multiprocessors() -> None:
    def names(n: int, k: int) -> list[str]:
        problem = Problem("scaled_mm", "e4m3", "e4m3", "bf16", n, k, scales="block")
        choices = candidates(problem, 16)
        return [min(choices, key=lambda choice: plan.cost(problem, choice, 16)).kernel, *(c.kernel for c in choices)]

    folded = "scaled_mm_e4m3_e4m3_block_decode16x16"
    assert names(2048, 16384)[0] == folded  # measured: 10.5 µs, and 11.9 of the next
    assert names(2048, 10944)[0] == "scaled_mm_e4m3_e4m3_block_decode16"  # 9.5, and 13.1 of the folded one
    assert folded in names(132 * 16, 4096) and folded not in names(132 * 16 + 1, 4096)


def test_a_tail_of_k_makes_operands_cost_more() -> None:
    problem = Problem("scaled_mm", "e4m3", "e4m3", "bf16", 4096, 10944, scales="block")
    best = min(candidates(problem, 64), key=lambda choice: plan.cost(problem, choice, 64))
    assert str(best) != "scaled_mm_e4m3_e4m3_block_64x32x128_1x1:split=1"  # measured: 22 % slower than the best


@pytest.mark.parametrize("k", [16, 40, 77, 1000, 8208])
def test_parts_of_k_are_whole_pieces_of_16_bytes(k: int) -> None:
    for kind, n, m in itertools.product(KINDS, (24, 4096), (1, 40, 1000)):
        problem = Problem(n=n, k=k, **kind)
        for choice in candidates(problem, m):
            kernel, split = KERNELS[choice.kernel], choice.options.split
            if isinstance(kernel.tile, (Decode, Blockwise, MixedInput, Sm80)):
                assert split in (0, 1, 2, 4, 8, 16)
            elif split > 1:
                assert k % split == 0 and k // split * plan.BYTES[problem.a] % 16 == 0


@pytest.mark.parametrize(("d", "gated"), [("bf16", True), ("fp32", True), ("e4m3", True), ("e4m3", False)])
def test_fused_forms_have_kernels_of_their_own(d: str, gated: bool) -> None:
    problem = Problem("scaled_mm", "e4m3", "e4m3", d, 896, 1040, scales="block", gated=gated)
    check(problem)
    for m in (1, 65, 5000):
        *kernels, last = candidates(problem, m)
        assert kernels and last == SEPARATELY
        for choice in kernels:
            tile = KERNELS[choice.kernel].tile
            assert isinstance(tile, Blockwise) and tile.gated == gated and (d != "e4m3" or tile.quantizes)
    assert not any(problem.takes(KERNELS[choice.kernel], 100) for choice in candidates(PROBLEM, 100))
    if gated:  # its halves must start at whole chunks
        assert candidates(replace(problem, n=960), 100) == [SEPARATELY]


@pytest.mark.parametrize(
    "other",
    [{"scales": ""}, {"scales": "group"}, {"aligned": False}, {"layout": "tt"}, {"k": 0}, {"a": "e5m2"}],
    ids=str,
)
def test_fused_forms_that_no_kernel_has_are_separate(other: dict[str, Any]) -> None:
    problem = replace(Problem("scaled_mm", "e4m3", "e4m3", "e4m3", 896, 1040, scales="block"), **other)
    assert plan.plan(problem) == (plan.Row(NO_LIMIT, SEPARATELY),)


def test_fused_forms_are_separate_where_that_is_faster(table: dict[Any, Any]) -> None:
    """Few tokens have decode's kernels, which write sums; where there are many, sums are too much to write and read."""
    wide = Problem("scaled_mm", "e4m3", "e4m3", "e4m3", 8192, 4096, scales="block", gated=True)
    for problem in (wide, replace(wide, gated=False), replace(wide, d="bf16")):
        assert choose(replace(problem, n=2048), 1) == SEPARATELY
        assert choose(problem, 8192) != SEPARATELY
    fastest, slower = (
        Choice(f"scaled_mm_e4m3_e4m3_block_{tile}_gated") for tile in ("64x256x128_1x1", "128x256x128_2x1")
    )
    of_wide = ("scaled_mm", "e4m3", "e4m3", "e4m3", False, "block", True, 8192, 4096)
    table[of_wide] = {64: [SEPARATELY, fastest], 8192: [fastest, SEPARATELY, slower]}
    assert [row.choice for row in plan.plan(wide)] == [SEPARATELY, fastest]
    assert not PROBLEM.allows(SEPARATELY, 1)


@pytest.mark.parametrize("scales", STEPS)
@pytest.mark.parametrize("a", HALF)
def test_four_bits_take_kernels_for_as_many_k_as_share_a_scale(a: str, scales: str) -> None:
    for gated in (False, True):
        problem = Problem("w4a16_mm", a, "int4", "bf16", 28672, 4096, scales=scales, gated=gated)
        check(problem)
        for m in (1, 40, 5000):
            kernels = [KERNELS[c.kernel] for c in candidates(problem, m) if c != SEPARATELY]
            assert kernels
            for kernel in kernels:
                assert kernel.gemm.scales == scales
                assert isinstance(kernel.tile, Sm80) if m == 1 and not gated else kernel.tile.gated == gated
        names = {name for name, kernel in KERNELS.items() if problem.takes(kernel, 1)}
        taken = {KERNELS[name].gemm.scales for name in names}
        finer = {"group128": ("group128", "group64", "group32"), "group64": ("group64", "group32")}
        assert taken == set(finer.get(scales, (scales,)))
    # Halves of whole strips of 16 rows, or else sums, and another launch.
    assert candidates(replace(problem, n=28672 - 16), 100) == [SEPARATELY]


def test_tiles_are_shared_where_the_last_wave_leaves_multiprocessors_idle() -> None:
    def splits(n: int, m: int) -> set[int]:
        problem = Problem("w4a16_mm", "bf16", "int4", "bf16", n, 8192, scales="group128")
        name = "w4a16_mm_bf16_int4_group128_128x256_rounded"
        return {c.options.split for c in candidates(problem, m) if c.kernel == name}

    assert splits(132 * 128, 256) == splits(66 * 128, 512) == {1}
    assert splits(132 * 128, 257) == {1} and splits(131 * 128, 256) == splits(100 * 128, 512) == {1, 2}
    assert splits(30 * 128, 256) == {1, 2, 4, 8}
    assert splits(128, 256) == {1, 2, 4, 8, 16}


def test_what_hopper_has_and_what_ampere_has() -> None:
    for op, b, scales in (("w4a16_mm", "int4", "group128"), ("w8a16_mm", "e4m3", ""), ("w8a16_mm", "int8", "block")):
        problem = Problem(op, "bf16", b, "bf16", 4096, 4096, scales=scales)
        of_hopper = Sm80 if scales == "block" else (MixedInput, Sm80)
        for other, kind in (({}, of_hopper), ({"k": 0}, of_hopper), ({"hopper": False}, Sm80)):
            check(replace(problem, **other))
            tiles = {type(KERNELS[row.choice.kernel].tile) for row in plan.plan(replace(problem, **other))}
            assert tiles == set(kind if isinstance(kind, tuple) else (kind,))
        if op == "w8a16_mm":  # TMA reads the weight as it is
            assert all(isinstance(kernel.tile, Sm80) for kernel in replace(problem, aligned=False).kernels(1000))
    assert not list(replace(PROBLEM, hopper=False).kernels(1))


def test_kernels_for_ampere_round_values_of_four_bits_where_scales_have_the_type_of_x() -> None:
    problem = Problem("w4a16_mm", "bf16", "int4", "bf16", 28672, 4096, scales="group128", hopper=False)
    for m, forms in ((8, {False}), (32, {False, True}), (64, {False, True}), (4096, {True})):
        assert {KERNELS[choice.kernel].tile.rounded for choice in candidates(problem, m)} == forms
        assert not any(KERNELS[c.kernel].tile.rounded for c in candidates(replace(problem, same_type=False), m))
    assert not any(k.tile.rounded for k in replace(problem, same_type=False).kernels(64))


@pytest.mark.parametrize(
    ("k", "group_size", "want"),
    [
        (4096, 128, "group128"),
        (4096, 256, "group128"),
        (4096, 64, "group64"),
        (4096, 32, "group32"),
        (4096, -1, "group128"),
        (100, 100, "group128"),
        (100, 128, "group128"),
        (64, 64, "group128"),
        (96, 64, "group64"),
        (20, 32, "group128"),
        (0, 1, "group128"),
    ],
)
def test_groups_of_four_bit_weights(k: int, group_size: int, want: str) -> None:
    assert gemm.group_of(k, group_size, False) == want
    assert gemm.group_of(k, group_size, True) == "group32_minimum"


def test_few_tokens_take_decode_and_many_take_tiles() -> None:
    scaled = (("scaled_mm", "e4m3", scales) for scales in ("", "block", "group"))
    for op, a, scales in (("mm", "bf16", ""), ("scaled_mm", "int8", ""), *scaled):
        problem = Problem(op, a, a, "bf16", 4096, 4096, fast_accum=a == "e4m3" and not scales, scales=scales)
        assert isinstance(KERNELS[choose(problem, 1).kernel].tile, Decode)
        assert not isinstance(KERNELS[choose(problem, 8192).kernel].tile, Decode)
        ragged = replace(problem, k=4095, aligned=False)
        assert [is_any(row.choice) for row in plan.plan(ragged)] == [True]


# Measured tables


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """In place of the tables in tuned/."""
    rows: dict[Any, Any] = {}
    monkeypatch.setattr(plan, "_table", lambda device: rows)
    return rows


PROBLEM = Problem("mm", "bf16", "bf16", "bf16", 512, 1024)
KEY = ("mm", "bf16", "bf16", "bf16", False, "", False, 512, 1024)
SEPARATELY = Choice(SEPARATE)


def test_measured_kernels_come_first(table: dict[Any, Any]) -> None:
    wide = Choice("mm_bf16_bf16_bf16_128x256x64_2x1_cooperative", Options(swizzle=2))
    small = Choice("mm_bf16_bf16_decode16", Options(split=2))
    table[KEY] = {7: [small], 100: [wide]}
    # A measured m speaks for the sizes up to it, the largest for those beyond it.
    assert choose(PROBLEM, 1) == choose(PROBLEM, 7) == small
    assert choose(PROBLEM, 8) == choose(PROBLEM, 100) == choose(PROBLEM, 10**6) == wide
    check(PROBLEM)
    unmeasured = Problem("mm", "bf16", "bf16", "bf16", 512, 2048)
    assert choose(unmeasured, 1) != small


def test_measured_kernels_that_may_not_run_are_passed_over(table: dict[Any, Any]) -> None:
    small, wide = Choice("mm_bf16_bf16_decode8"), Choice("mm_bf16_bf16_bf16_128x128x64_2x1_pingpong")
    table[KEY] = {2048: [small, wide]}
    assert choose(PROBLEM, 8) == small
    assert choose(PROBLEM, 9) == wide  # measured at 2048, where decode8 can't have been, and good for 9
    check(PROBLEM)
    misaligned = Problem(*KEY[:4], 512, 1024, aligned=False)
    check(misaligned)
    assert is_any(choose(misaligned, 8))


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.stem)
def test_tables_name_declared_kernels_that_take_their_problem(path: Path) -> None:
    device = path.stem.replace("_", " ")
    for row in json.loads(path.read_text())["rows"]:
        problem = Problem(**dict(zip(plan.TUNED_BY, plan.tuned_by(row), strict=True)))
        assert row["best"]
        for best in row["best"]:
            assert best["kernel"] in DECLARED
            assert problem.allows(Choice(best["kernel"]), row["m"])
            assert best.keys() - {"kernel", "us"} <= {name for name, _ in plan._Options._fields_}
        check(problem, device)


# Names with options


@given(
    kernel=st.sampled_from(sorted(KERNELS)),
    options=st.builds(Options, **{name: st.integers(0, 2**31 - 1) for name, _ in plan._Options._fields_}),
)
def test_a_choice_is_the_text_that_it_prints(kernel: str, options: Options) -> None:
    choice = Choice(kernel, options)
    assert Choice.parse(str(choice)) == choice


def test_parse() -> None:
    assert Choice.parse("x") == Choice.parse("x:") == Choice("x")
    assert Choice.parse("x:swizzle=4,split=2") == Choice("x", Options(split=2, swizzle=4))
    assert str(Choice("x", Options(split=2, swizzle=4))) == "x:split=2,swizzle=4"
    for wrong in ("speed=2", "split", "split=", "split=-1", "split=2.0", "split =2", "=2"):
        with pytest.raises(
            ValueError, match=rf"kernel: '{wrong}' is not an option; it must be .*split.* with a number"
        ):
            Choice.parse(f"x:{wrong}")


# explain()


def test_explain_prints_the_plan() -> None:
    text = explain("scaled_mm", 4096, 4096)
    assert text == explain("scaled_mm", 4096, 4096)
    header, *lines = text.splitlines()
    assert re.fullmatch(
        r"scaled_mm of e4m3 to bf16, n = 4096, k = 4096 on NVIDIA H200: (by the cost model|measured at .*)", header
    )
    rows = plan.plan(Problem("scaled_mm", "e4m3", "e4m3", "bf16", 4096, 4096, fast_accum=True))
    assert [line.split()[-1] for line in lines] == [str(row.choice) for row in rows]
    assert lines[0].startswith("  m = 1")
    assert lines[-1].startswith(f"  m from {rows[-2].m_limit + 1} ")


@pytest.mark.parametrize("m", [1, 7, 64, 8192, 10**6])
def test_explain_one_m(m: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        problem = Problem("mm", plan.DTYPES[dtype], plan.DTYPES[dtype], "fp32", 256, 512)
        text = explain("mm", 256, 512, m, dtype=dtype, out_dtype=torch.float32)
        assert [line.split()[-1] for line in text.splitlines()[1:]] == [str(choose(problem, m))]


def test_explain_knows_what_is_not_aligned() -> None:
    assert "mm_bf16_bf16_any" in explain("mm", 64, 63)
    assert "_any" not in explain("mm", 63, 64, 1)


def test_explain_int8() -> None:
    text = explain("scaled_mm", 4096, 4096, dtype=torch.int8)
    assert text.startswith("scaled_mm of int8 to bf16, n = 4096, k = 4096 on NVIDIA H200: measured at m = 1, 8, ")
    assert all(line.split()[-1].startswith("scaled_mm_int8_int8_") for line in text.splitlines()[1:])
    assert text == explain("scaled_mm", 4096, 4096, dtype=torch.int8, use_fast_accum=False)


@pytest.mark.parametrize("scales", ["block", "group"])
def test_explain_scales_for_blocks(scales: str) -> None:
    text = explain("scaled_mm", 4096, 4096, scales=scales)
    assert text.startswith(f"scaled_mm of e4m3 to bf16 with scales for each {scales}, n = 4096, k = 4096 on ")
    names = re.findall(r"scaled_mm_\w+", text)
    assert all(KERNELS[name].gemm.scales for name in names)
    assert any("_columns" in name for name in names) == (scales == "group")
    assert text == explain("scaled_mm", 4096, 4096, scales=scales, use_fast_accum=False)


def test_explain_fused_forms() -> None:
    text = explain("scaled_mm_quant", 8192, 4096, scales="block", silu_and_mul=True)
    assert text.startswith("scaled_mm_quant of e4m3 to e4m3 with scales for each block, n = 8192, k = 4096 on ")
    assert "_gated:" in text
    assert "_gated:" in explain("scaled_mm_silu_and_mul", 8192, 4096, 4096, scales="block")
    assert "gated" not in explain("scaled_mm_quant", 8192, 4096, scales="block")
    assert explain("scaled_mm_silu_and_mul", 8192, 4096).splitlines()[1:] == ["  m from 1             separate"]


def test_explain_ops_named_for_a_weight() -> None:
    text = explain("w4a16_mm", 4096, 4096)
    assert text.startswith("w4a16_mm of bf16 and int4 to bf16 with scales for each group128, n = 4096, k = 4096 on ")
    assert text == explain("w4a16_mm", 4096, 4096, group_size=-1) == explain("w4a16_mm", 4096, 4096, group_size=256)
    assert "_fp16_int4_group32_minimum_" in explain("w4a16_mm", 64, 64, dtype=torch.float16, minimum=True)
    assert "_int4_group32_128x" in explain("w4a16_mm", 4096, 4096, 100, group_size=32)
    assert "_gated" in explain("w4a16_mm_silu_and_mul", 28672, 4096, 2048)
    assert "w8a16_mm_bf16_e4m3_sm80_" in explain("w8a16_mm", 4096, 4096)
    assert "w8a16_mm_bf16_int8_block_sm80_" in explain("w8a16_mm", 4096, 4096, dtype=torch.int8, scales="block")
    for op, scales in (("w4a16_mm", "block"), ("w8a16_mm", "group")):
        with pytest.raises(ValueError, match=f"^explain: scales is '{scales}'; for {op} of "):
            explain(op, 64, 64, scales=scales)
    with pytest.raises(ValueError, match=r"^explain: group_size is 48; it must be 32, 64, 128, 256 or -1"):
        explain("w4a16_mm", 64, 64, group_size=48)


def test_explain_refuses_what_no_op_takes() -> None:
    for op, dtype, scales in (("mm", None, "block"), ("scaled_mm", torch.int8, "group"), ("scaled_mm", None, "row")):
        with pytest.raises(ValueError, match=f"^explain: scales is '{scales}'; for {op} of "):
            explain(op, 64, 64, dtype=dtype, scales=scales)
    with pytest.raises(
        ValueError, match=r"explain: op is 'matmul'; it must be mm, scaled_mm, scaled_mm_silu_and_mul, "
    ):
        explain("matmul", 64, 64)
    with pytest.raises(ValueError, match=r"explain: silu_and_mul is True; for scaled_mm it must be False"):
        explain("scaled_mm", 64, 64, silu_and_mul=True)
    with pytest.raises(ValueError, match=r"explain: n is 63; for gates and what is gated it must be even"):
        explain("scaled_mm_silu_and_mul", 63, 64)
    with pytest.raises(ValueError, match=r"explain: dtype is torch.int8; it must be torch.float8_e4m3fn, "):
        explain("scaled_mm_quant", 64, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"explain: dtype is torch.int8; it must be torch.bfloat16, torch.float16$"):
        explain("mm", 64, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"explain: dtype is torch.float16; it must be .*, torch.int8$"):
        explain("scaled_mm", 64, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"explain: out_dtype is torch.int8; it must be .*, torch.float32$"):
        explain("scaled_mm", 64, 64, out_dtype=torch.int8)


# What Python and csrc/dispatch.cpp tell each other

C_TYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "const char*": ctypes.c_char_p,
    "cutegemm_tensor": plan._Tensor,
    "cutegemm_options": plan._Options,
}


def fields_in_c(struct: str) -> list[tuple[str, Any]]:
    text = "".join((library.csrc() / name).read_text() for name in ("kernel_abi.h", "dispatch.cpp"))
    (body,) = re.findall(rf"struct {struct} \{{(.*?)\n\}}", text, re.DOTALL)
    found: list[tuple[str, Any]] = []
    for declaration in re.sub(r"//.*", "", body).split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*((?:const )?\w+\*?)\s+(.*?)\s*", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            name, _, count = name.strip().rstrip("]").partition("[")
            found.append((name, C_TYPES[kind] * int(count) if count else C_TYPES[kind]))
    return found


@pytest.mark.parametrize(
    ("struct", "mirror"),
    [
        ("cutegemm_options", plan._Options),
        ("cutegemm_tensor", plan._Tensor),
        ("cutegemm_request", plan._Request),
        ("cutegemm_plan_row", plan._Row),
    ],
)
def test_structures_are_those_of_c(struct: str, mirror: type[ctypes.Structure]) -> None:
    assert list(mirror._fields_) == fields_in_c(struct)  # type: ignore[arg-type]


def test_separate_is_what_c_calls_it() -> None:
    assert f'return kernel == "{SEPARATE}";' in (library.csrc() / "dispatch.cpp").read_text()


def test_numbers_of_types_are_those_of_c() -> None:
    header = (library.csrc() / "kernel_abi.h").read_text()
    numbers = {name.lower(): int(number) for name, number in re.findall(r"CUTEGEMM_(\w+) = (\d+)", header)}
    assert {name or "none": number for name, number in plan._KERNEL_TYPES.items()} == numbers
    include = Path(torch.__file__).parent / "include/torch/headeronly/core/ScalarType.h"
    order = re.findall(r"^\s*_\([\w:<>]+, (\w+)\)\s*/\* (\d+) \*/", include.read_text(), re.MULTILINE)
    torch_numbers = {name: int(number) for name, number in order}
    in_c = re.findall(r'\{ScalarType::(\w+), "(\w+)"\}', (library.csrc() / "torch_op.h").read_text())
    assert {torch_numbers[name]: getattr(torch, dtype) for name, dtype in in_c} == plan._SCALAR_TYPES


class Dispatcher:
    """Notes what Python tells the dispatcher."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, Options]] = []
        self.key: tuple[int, ...] = ()
        self.opened: list[str] = []
        self.refusal = b""

    def cutegemm_add_plan(self, request: Any, rows: Any, count: int, *key: int) -> None:
        self.rows = [
            (
                row.m_limit,
                row.kernel.decode(),
                Options(*(getattr(row.options, name) for name, _ in row.options._fields_)),
            )
            for row in rows[:count]
        ]
        self.key = key

    def cutegemm_open(self, name: bytes, path: bytes, text: Any, size: int) -> int:
        self.opened.append(name.decode())
        text.value = self.refusal
        return len(self.refusal)


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    made = Dispatcher()
    monkeypatch.setattr(plan, "_dispatcher", made)
    monkeypatch.setattr(plan, "_opened", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: plan.H200)
    monkeypatch.setattr(library, "kernel", lambda name: Path(f"/{name}.so"))
    return made


NUMBERS = {dtype: number for number, dtype in plan._SCALAR_TYPES.items()}


ADDRESSES = itertools.count(2**40, 2**36)


def described(x: torch.Tensor, cuda_index: int = 0) -> plan._Tensor:
    eight = ctypes.c_int64 * 8
    # An address of its own for each: meta tensors have none.
    address = x.data_ptr() or next(ADDRESSES)
    return plan._Tensor(1, NUMBERS[x.dtype], cuda_index, x.dim(), eight(*x.shape), eight(*x.stride()), address)


def ask(*, size: int = 4096, **request: Any) -> str:
    """What the dispatcher reads when it asks: "" or a sentence."""
    tensors = {name: described(x) for name, x in request.items() if isinstance(x, torch.Tensor)}
    op = plan.PRODUCTS[request.get("product", 0)].encode()
    rest = {"op": op, "out_dtype": -1, "aligned_operands": 1, "aligned_out": 1}
    text = ctypes.create_string_buffer(b"?" * size)
    status = plan._resolve(ctypes.byref(plan._Request(**(rest | request | tensors))), ctypes.addressof(text), size)
    assert status == (text.value != b"?" * size)
    return text.value.decode() if status else ""


A, B = torch.empty(5, 1024, dtype=torch.bfloat16), torch.empty(512, 1024, dtype=torch.bfloat16).t()


def test_a_request_is_answered_with_the_plan(dispatcher: Dispatcher) -> None:
    assert ask(a=A, b=B) == ""
    assert dispatcher.rows == [(row.m_limit, *row.choice) for row in plan.plan(PROBLEM)]
    assert dispatcher.key == (512, 1024, 0, 0, 2, 2, 2)
    assert dispatcher.opened == [choose(PROBLEM, 5).kernel]


def test_a_kernel_by_name(dispatcher: Dispatcher) -> None:
    assert ask(a=A, b=B, kernel=b"mm_bf16_bf16_decode8:split=4,no_chain=1") == ""
    assert dispatcher.rows == [(NO_LIMIT, "mm_bf16_bf16_decode8", Options(split=4, no_chain=1))]
    assert dispatcher.opened == ["mm_bf16_bf16_decode8"]
    assert ask(a=A, b=B, aligned_operands=0, kernel=b"mm_bf16_bf16_decode8") == (
        "mm: kernel mm_bf16_bf16_decode8 does not take m = 5, n = 512, k = 1024 of bf16 and bf16 to bf16 in layout tn, "
        "not aligned to 16 bytes"
    )
    for name in (b"", b"mm_bf16_bf16_decode8:fast=1", b"scaled_mm_fp8_fp8_any"):
        assert "kernel" in ask(a=A, b=B, kernel=name)


def test_a_request_that_is_not_in_order_is_answered_with_the_sentence(dispatcher: Dispatcher) -> None:
    assert ask(a=A, b=B[1:]) == "mm: a is [5, 1024] and b is [1023, 512]; the k of a, 1024, must be the k of b, 1023"
    assert ask(a=A, b=B, bias=torch.empty(5)) == "mm: bias is [5]; it must be [512], one element for each column of b"
    assert ask(a=A, b=B, out_dtype=3) == (
        "mm: out_dtype is torch.int32; it must be torch.bfloat16, torch.float16 or torch.float32"
    )
    fp8 = {"a": A.to(torch.float8_e4m3fn), "b": B.to(torch.float8_e4m3fn), "product": 1, "scale_a": torch.ones(1)}
    assert ask(**fp8, scale_b=torch.ones(2)).startswith(
        "scaled_mm: scale_b is [2]; it must have one element, or be [512]"
    )
    assert ask(a=A, b=B, out_dtype=44).startswith("mm: out_dtype is torch.float8_e8m0fnu; it must be torch.bfloat16")
    assert ask(**fp8 | {"scale_a": torch.ones(1, dtype=torch.uint16)}, scale_b=torch.ones(1)) == (
        "scaled_mm: scale_a is torch.uint16; it must be torch.float32"
    )
    assert dispatcher.rows == []
    assert ask(a=A, b=B[1:], size=12) == "mm: a is [5"  # the end of a longer text is lost, and nothing beyond written


def test_a_request_with_a_zero_point(dispatcher: Dispatcher) -> None:
    ones = torch.ones(1)
    int8 = {"a": A.to(torch.int8), "b": B.to(torch.int8), "product": 1, "scale_a": ones, "scale_b": ones}
    points, sums = torch.zeros(5, 1, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    assert ask(**int8, zero_point_a=points, sum_b=sums) == ""
    problem = Problem("scaled_mm", "int8", "int8", "bf16", 512, 1024)
    assert dispatcher.rows == [(row.m_limit, *row.choice) for row in plan.plan(problem)]
    assert dispatcher.key == (512, 1024, 0, 0, 6, 6, 2)
    assert ask(**int8, zero_point_a=points) == "scaled_mm: sum_b is None; it must be given where zero_point_a is"
    assert ask(**int8, zero_point_a=points[1:], sum_b=sums).startswith("scaled_mm: zero_point_a is [4, 1]; it must")


@pytest.mark.parametrize(("rows", "number", "scales"), [(2, 1, "block"), (130, 2, "group")])
def test_a_request_with_scales_for_blocks(dispatcher: Dispatcher, rows: int, number: int, scales: str) -> None:
    fp8 = {
        "a": torch.zeros(5, 512, dtype=torch.float8_e4m3fn),
        "b": torch.zeros(130, 512, dtype=torch.float8_e4m3fn).t(),
    }
    how = {"product": 1, "scale_a": torch.ones(4, 5).t(), "scale_b": torch.ones(rows, 4)}
    problem = Problem("scaled_mm", "e4m3", "e4m3", "bf16", 130, 512, scales=scales)
    assert ask(**fp8, **how, residual=torch.zeros(5, 130)) == ""
    assert dispatcher.rows == [(row.m_limit, *row.choice) for row in plan.plan(problem)]
    assert dispatcher.key == (130, 512, 0, number, 4, 4, 2)
    assert ask(**fp8, **how, residual=torch.zeros(5, 131)).startswith("scaled_mm: residual is [5, 131]; it must")
    if scales == "block":
        whole = {**fp8, "b": torch.zeros(256, 512, dtype=torch.float8_e4m3fn).t()}
        assert ask(**whole, **how, op=b"scaled_mm_silu_and_mul", gated=1) == ""
        gated = Problem("scaled_mm", "e4m3", "e4m3", "bf16", 256, 512, scales=scales, gated=True)
        assert dispatcher.rows == [(row.m_limit, *row.choice) for row in plan.plan(gated)]
        assert ask(**whole, **how, op=b"scaled_mm_quant", quantized=1) == ""
        quantized = replace(gated, d="e4m3", gated=False)
        assert dispatcher.rows == [(row.m_limit, *row.choice) for row in plan.plan(quantized)]
        assert dispatcher.opened == [choose(each, 5).kernel for each in (problem, gated, quantized)]


@pytest.mark.parametrize("op", ["scaled_mm_silu_and_mul", "scaled_mm_quant"])
def test_a_request_for_the_sums_of_another_op(dispatcher: Dispatcher, op: str) -> None:
    fp8 = {"a": A.to(torch.float8_e4m3fn), "b": B.to(torch.float8_e4m3fn)}
    how = {"op": op.encode(), "product": 1, "out_dtype": 6, "scale_a": torch.ones(1), "scale_b": torch.ones(1)}
    assert ask(**fp8, **how) == ""
    assert dispatcher.key == (512, 1024, 0, 0, 4, 4, 1)
    assert ask(**fp8, **how, kernel=b"fast").startswith(f"{op}: kernel is 'fast', which is not a kernel of scaled_mm; ")
    assert ask(**fp8, **how, gated=1, kernel=b"separate") == ""
    assert dispatcher.rows == [(NO_LIMIT, *SEPARATELY)]
    assert dispatcher.opened == [choose(Problem("scaled_mm", "e4m3", "e4m3", "fp32", 512, 1024), 5).kernel]
    name = b"scaled_mm_e4m3_e4m3_block_64x256x128_1x1_gated"
    assert ask(**fp8, **how, gated=1, kernel=name).startswith(f"{op}: kernel {name.decode()} does not take m = 5, ")


X = torch.empty(5, 200, dtype=torch.float16)


def packed_request(group_size: int = 64, groups: int = 4) -> dict[str, Any]:
    """Of w4a16_mm with a weight of [130, 200]."""
    packed = torch.empty(12, 4, 32, 4, dtype=torch.int32)
    sizes = {"n": 130, "k": 200, "group_size": group_size}
    return {"product": 2, "a": X, "b": packed, "scale_b": torch.empty(12, groups, 16), **sizes}


def test_a_request_with_a_packed_weight(dispatcher: Dispatcher) -> None:
    assert ask(**packed_request()) == ""
    problem = Problem("w4a16_mm", "fp16", "int4", "fp16", 130, 200, scales="group64", same_type=False)
    assert dispatcher.rows == [(row.m_limit, *row.choice) for row in plan.plan(problem)]
    assert dispatcher.key == (130, 200, 0, plan.SCALES.index("group64") + len(STEPS), 3, 9, 3)
    right = packed_request()
    assert ask(**right | {"scale_b": right["scale_b"].half()}) == ""
    assert dispatcher.rows == [(row.m_limit, *row.choice) for row in plan.plan(replace(problem, same_type=True))]
    assert dispatcher.key == (130, 200, 0, plan.SCALES.index("group64"), 3, 9, 3)
    zeros, residual = torch.empty(12, 4, 16), torch.empty(5, 130, dtype=torch.bfloat16)
    permutation = torch.empty(200, dtype=torch.int32)
    rest = {"zeros": zeros, "residual": residual, "permutation": permutation, "bias": torch.empty(130)}
    assert ask(**packed_request(), **rest, minimum=1, out_dtype=6) == ""
    assert dispatcher.key == (130, 200, 0, plan.SCALES.index("group32_minimum") + len(STEPS), 3, 9, 1)
    assert ask(**packed_request(-1, 1), op=b"w4a16_mm_silu_and_mul", gated=1) == ""
    gated = replace(problem, scales="group128", gated=True)
    assert dispatcher.rows == [(row.m_limit, *row.choice) for row in plan.plan(gated)]
    name = b"w4a16_mm_fp16_int4_group32_64x32"
    assert ask(**packed_request(), kernel=name + b":split=2") == ""
    assert dispatcher.rows == [(NO_LIMIT, name.decode(), Options(split=2))]
    assert ask(**packed_request(-1, 1), minimum=1, kernel=name) == "w4a16_mm: zeros is None; it must be given"
    assert ask(**packed_request(), **rest, minimum=1, kernel=name).startswith(
        f"w4a16_mm: kernel {name.decode()} does not take m = 5, n = 130, k = 200 of fp16 and int4 to fp16 in layout tn"
    )


def test_weights_are_rounded_only_where_scales_have_the_type_of_x() -> None:
    for same_type in (True, False):
        for gated in (True, False):
            problem = Problem(
                "w4a16_mm", "bf16", "int4", "bf16", 4096, 4096, scales="group128", gated=gated, same_type=same_type
            )
            tiles = [KERNELS[c.kernel].tile for c in candidates(problem, 4096) if c != SEPARATELY]
            assert any(isinstance(tile, MixedInput) and tile.rounded for tile in tiles) == same_type


def test_what_a_packed_weight_is_refused_for(dispatcher: Dispatcher) -> None:
    right = packed_request()
    assert ask(**right | {"a": X[:, 1:]}) == (
        "w4a16_mm: x is [5, 199] and w is [130, 200]; the k of x, 199, must be the k of w, 200"
    )
    assert ask(**right | {"b": right["b"][:8]}) == "w4a16_mm: packed is [8, 4, 32, 4]; it must be [12, 4, 32, 4]"
    every_second = torch.empty(24, 4, 32, 4, dtype=torch.int32)[::2]
    assert ask(**right | {"b": every_second}) == (
        "w4a16_mm: packed has the strides [1024, 128, 4, 1]; it must be contiguous"
    )
    assert ask(**right | {"n": 131}, op=b"w4a16_mm_silu_and_mul", gated=1) == (
        "w4a16_mm_silu_and_mul: w is [131, 200]; its n must be even, a gate for each value"
    )
    out = torch.empty(5, 130, dtype=torch.float16)
    x_of_out = out.flatten()[:600].view(3, 200)
    assert ask(**right | {"a": x_of_out}, out=out[:3]) == (
        "w4a16_mm: out lies in the memory of x; it must not, since x is read while it is written"
    )
    assert dispatcher.rows == []


@pytest.mark.parametrize(("shape", "scales"), [((1,), ""), ((130, 1), ""), ((2, 2), "block")])
def test_a_request_with_a_weight_of_eight_bits(dispatcher: Dispatcher, shape: tuple[int, ...], scales: str) -> None:
    w = torch.empty(130, 256, dtype=torch.int8)[:, :200]
    right = {"product": 3, "a": X, "b": w, "scale_b": torch.empty(shape)}
    assert ask(**right) == ""
    problem = Problem("w8a16_mm", "fp16", "int8", "fp16", 130, 200, scales=scales)
    assert dispatcher.rows == [(row.m_limit, *row.choice) for row in plan.plan(problem)]
    assert dispatcher.key == (130, 200, 0, plan.SCALES.index(scales), 3, 6, 3)
    assert ask(**right | {"b": w.t()}) == (
        "w8a16_mm: w has the strides [1, 256]; its last dimension must have stride one"
    )


def test_on_ampere_there_are_kernels_for_weights(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (8, 6), (8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        for request in (packed_request(), {"product": 3, "a": X, "b": X.to(torch.int8), "scale_b": torch.ones(1)}):
            dispatcher.rows = []
            assert ask(**request) == ""
            assert dispatcher.rows and all("_sm80_" in name for _, name, _ in dispatcher.rows)
        refused = [{"a": A, "b": B}, packed_request() | {"op": b"w4a16_mm_silu_and_mul", "gated": 1}]
        for request in refused:
            assert ask(**request).endswith("it must be 9.0 (H100, H200)")
    for capability in ((7, 5), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert ask(**packed_request()).endswith(
            f"compute capability {capability[0]}.{capability[1]}; it must be 9.0 (H100, H200)"
        )


def test_an_op_without_a_fused_form_has_nothing_to_separate(dispatcher: Dispatcher) -> None:
    assert ask(a=A, b=B, kernel=b"separate").startswith("mm: kernel is 'separate', which is not a kernel of mm; ")


def test_what_goes_wrong_in_python_reaches_the_caller(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher.refusal = b"kernel file x: it is not a kernel file"
    assert ask(a=A, b=B) == "kernel file x: it is not a kernel file"
    monkeypatch.setattr(library, "kernel", lambda name: 1 / 0)
    assert ask(a=A, b=B) == "division by zero"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert ask(a=A, b=B) == ("mm: the GPU is NVIDIA H200, compute capability 8.0; it must be 9.0 (H100, H200)")


def test_empty_products_need_no_plan(dispatcher: Dispatcher) -> None:
    assert ask(a=A[:0], b=B) == ask(a=A, b=B[:, :0]) == ""
    assert dispatcher.rows == []
    assert ask(a=A[:, :0], b=B[:0]) == ""
    assert [name for _, name, _ in dispatcher.rows] == ["mm_bf16_bf16_any"]


@pytest.mark.parametrize(
    ("a", "b", "layout", "number"),
    [
        # sizes and strides of a (m, k) and of b (k, n)
        (((5, 6), (6, 1)), ((6, 7), (1, 6)), "tn", 0),
        (((5, 6), (6, 1)), ((6, 7), (7, 1)), "tt", 1),
        (((5, 6), (1, 5)), ((6, 7), (7, 1)), "nt", 17),
        (((5, 6), (1, 5)), ((6, 7), (1, 6)), "nn", 16),
        (((5, 6), (12, 2)), ((6, 7), (1, 6)), "", 9 * 16),
        (((5, 6), (6, 1)), ((6, 7), (14, 2)), "", 9),
        (((5, 6), (12, 2)), ((6, 7), (14, 2)), "", 9 * 16 + 9),
        # of a dimension of size one the stride means nothing
        (((5, 1), (3, 9)), ((1, 7), (9, 1)), "tn", 0),
        (((1, 6), (3, 9)), ((6, 1), (9, 5)), "nt", 17),
        (((1, 1), (3, 9)), ((1, 1), (9, 5)), "tn", 0),
        (((1, 6), (9, 1)), ((6, 1), (1, 9)), "tn", 0),
    ],
)
def test_layouts_and_their_numbers(a: Any, b: Any, layout: str, number: int) -> None:
    x, y = (torch.empty_strided(*shape, dtype=torch.bfloat16) for shape in (a, b))
    problem, found = plan._problem(plan._Request(aligned_operands=1), x, y, torch.float32)
    assert (problem.layout, found) == (layout, number)
    assert (problem.n, problem.k, problem.a, problem.d) == (b[0][1], a[0][1], "bf16", "fp32")
    assert (problem.aligned, problem.aligned_out) == (True, False)


def test_a_described_tensor_passes_the_checks_that_the_tensor_passes() -> None:
    for x in (A, B, A[0], torch.ones(()), torch.ones(2, 3, 4)):
        seen = plan._Described(described(x, -1))
        assert (seen.dim(), tuple(seen.shape), seen.dtype, seen.device) == (x.dim(), tuple(x.shape), x.dtype, "cpu")
        assert seen.stride() == x.stride()
    assert plan._Described(described(A, 1)).device == "cuda:1"
    assert gemm.check_mm(plan._Described(described(A)), plan._Described(described(B))) == torch.bfloat16
