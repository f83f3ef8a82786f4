"""The Hopper prefill kernel: executed in the emulator on tiny shapes, and what its machine code must look like."""

import math
import re
from dataclasses import replace

import cases
import pytest
import torch

from hpcattn import (
    PackedKV,
    PagedKVCache,
    attention_prefill,
    attention_prefill_reference,
    emulator,
    explain,
    gather_kv,
    prepare_prefill,
    relative_error,
)
from hpcattn.bench.workloads import Workload
from hpcattn.cache import flatten_scales
from hpcattn.inspection import loops, variants
from hpcattn.kernels.hopper import prefill_launch as hopper
from hpcattn.validation import Settled

# queries and keys: tails of tiles and pages, q of 1, no queries, no keys, more queries than keys, exact tiles
LENGTHS = (((129,), (300,)), ((1, 0, 70), (130, 5, 70)), ((65,), (64,)), ((40, 3, 130), (40, 0, 256)), ((128,), (384,)))
GRID = cases.prefill_grid(lengths=LENGTHS)


@pytest.mark.parametrize("workload", GRID)
def test_prefill(workload, coverage):
    coverage(cases.describe(workload), "hopper", cases.check_prefill(cases.build(workload, "cpu"), "hopper"))


def inputs(q_lens, kv_lens, dtype="bf16", quant="-", **fields):
    sizes = dict(num_q_heads=2, num_kv_heads=1) | fields
    w = Workload(
        suite="prefill", case="v_mean=1.0", q_lens=q_lens, kv_lens=kv_lens, dtype=dtype, quant=quant, **sizes
    )  # fmt: skip
    return cases.build(w, "cpu")


def arguments(x):
    return x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens


def emulate(x, seed=0, **how):
    """The output of a launch in another configuration than the chosen one."""
    out = torch.full(x.q.shape, math.nan, dtype=torch.bfloat16)
    scales = flatten_scales(x.cache, x.scales)
    call = (x.q, x.cache.k, x.cache.v, x.block_table, x.cu_seqlens_q, x.seq_lens, *scales, x.block_mask)
    for step in hopper.launches(*call, x.q.shape[-1] ** -0.5, out, None, **how):
        if step.kernel is hopper.prefill_kernel:
            emulator.launch(step.kernel, step.grid, *step.args, schedule_seed=seed, **step.options)
        else:
            step.run(out.device)
    return out


CONFIGS = (
    hopper.Config(2, 2, 2, False, False), hopper.Config(2, 3, 2, True, False, True),
    hopper.Config(1, 2, 3, False, False),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "quant"), cases.FORMATS)
def test_every_schedule_of_warps_gives_the_same_bits(dtype, quant, seed):
    """Of one CTA that has several items; with one and two consumer warpgroups, in turns or not."""
    x = inputs((150,), (420,), dtype, quant, page_size=32)
    lazy = dtype == "bf16"
    expected = emulate(x)
    assert relative_error(expected, x.reference()[0]) < (4e-3 if lazy else 5e-2)
    assert torch.equal(emulate(x, seed + 1, config=CONFIGS[seed]._replace(lazy=lazy), num_ctas=1), expected)


@pytest.mark.parametrize("lazy", [False, True])
def test_maxima_that_jump_up_and_down(lazy):
    """Scores whose maxima grow by little and by much from tile to tile: what is rescaled, and when."""
    x = inputs((64,), (640,), num_q_heads=1)
    size = torch.tensor([1.0, 3.0, 30.0, 2.0, 12.0]).repeat_interleave(128)
    k = gather_kv(x.cache, x.block_table, 0, 640)[0] * size[:, None, None]
    for i, page in enumerate(x.block_table[0]):
        x.cache.k[page] = k[64 * i : 64 * i + 64]
    o = emulate(x, config=CONFIGS[0]._replace(lazy=lazy))
    assert relative_error(o, x.reference()[0]) < cases.BOUND["bf16"]


@pytest.mark.parametrize("tiles", [1, 2, 3, 4])
def test_few_tiles(tiles):
    """As many as there are slots, and more and fewer."""
    x = inputs((64,), (128 * tiles - 5,), page_size=128, num_q_heads=1)
    assert cases.check_prefill(x, "hopper") < cases.BOUND["bf16"]


@pytest.mark.parametrize("masked", [False, True])
def test_ctas_take_items_of_many_requests(masked):
    x = inputs((130, 0, 1, 70), (200, 40, 300, 0), num_q_heads=3)
    if masked:
        mask = torch.ones(4, 3, 2, 3, dtype=torch.uint8)
        mask[0, 1, 1] = 0  # nothing is left
        mask[2, :, 0, 1] = 0
        x = replace(x, block_mask=mask)
    o, lse = attention_prefill(
        *arguments(x), block_mask=x.block_mask, implementation="hopper", return_lse=True
    )  # fmt: skip
    expected, exact = attention_prefill_reference(*arguments(x), block_mask=x.block_mask)
    assert relative_error(o, expected) < cases.BOUND["bf16"]
    blind = exact == -math.inf
    assert torch.equal(lse == -math.inf, blind) and (o[blind] == 0).all() and blind.any()
    assert torch.equal(emulate(x, seed=2, num_ctas=2), o)


def test_packed():
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(150, n, 64, generator=generator).bfloat16() for n in (2, 4))
    starts = torch.tensor([0, 90, 90, 140], dtype=torch.int32)  # what follows is nobody's
    kv[140:] = math.nan
    packed = PackedKV(kv[:, :2], kv[:, 2:])
    o = attention_prefill(q, packed, None, starts, None, implementation="hopper")
    expected, _ = attention_prefill_reference(q, packed, None, starts, None)
    assert relative_error(o[:140], expected[:140]) < cases.BOUND["bf16"]


@pytest.mark.parametrize(("dtype", "quant"), [("bf16", "-"), ("fp8", "type0")])
def test_a_mask_of_ones_is_no_mask(dtype, quant):
    x = inputs((140,), (300,), dtype, quant)
    mask = torch.ones(1, 2, 2, 3, dtype=torch.uint8)
    dense = attention_prefill(*arguments(x), scales=x.scales, implementation="hopper")
    o = attention_prefill(*arguments(x), scales=x.scales, block_mask=mask, implementation="hopper")
    assert torch.equal(o, dense)


def test_a_narrow_mask_gives_nan():
    x = inputs((140,), (300,), num_q_heads=1)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    o = attention_prefill(*arguments(x), block_mask=mask, implementation="hopper")
    assert o[128:].isnan().all() and o[:128].isnan().all()


def test_padded_scales_and_a_length_beyond_the_table():
    x = inputs((100, 30), (150, 30), "fp8", "type1")
    padded = torch.zeros(2, 2, 128)
    for b, (start, stop) in enumerate(((0, 100), (100, 130))):
        padded[b, :, : stop - start] = x.scales.q[start:stop].T
    plain = attention_prefill(*arguments(x), scales=x.scales, implementation="hopper")
    other = replace(x.scales, q=padded)
    assert torch.equal(attention_prefill(*arguments(x), scales=other, implementation="hopper"), plain)
    x.seq_lens[0] = x.block_table.shape[1] * 64 + 1
    o = attention_prefill(*arguments(x), scales=other, implementation="hopper")
    assert o[:100].isnan().all() and torch.equal(o[100:], plain[100:])


def test_strides_of_q_and_out_are_honoured():
    x = inputs((70,), (100,))
    wide = torch.full((70, 2, 136), math.nan).bfloat16()
    wide[..., :128] = x.q
    dense = attention_prefill(*arguments(x), implementation="hopper")
    strided = attention_prefill(wide[..., :128], *arguments(x)[1:], implementation="hopper")
    assert torch.equal(strided, dense)
    out = torch.empty_like(dense)
    call = prepare_prefill(*arguments(x), out=out, implementation="hopper")
    assert call() is out and torch.equal(out, dense)


def test_what_the_kernel_cannot_read():
    x = inputs((70,), (100,))
    wide = torch.zeros(1, 2, 1, hopper.MAX_COLUMNS + 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"columns\): use 'portable' or 'auto'"):
        attention_prefill(*arguments(x), block_mask=wide, implementation="hopper")
    odd = torch.zeros(70 * 256 + 1).bfloat16()[1:].view(70, 2, 128)
    with pytest.raises(ValueError, match="16 bytes"):
        attention_prefill(odd, *arguments(x)[1:], implementation="hopper")
    assert "implementation = hopper" in str(explain(attention_prefill, *arguments(x), implementation="hopper"))


def test_alignment_is_looked_at_in_every_call():
    """What an aligned call settled is not taken for an odd one, in either order."""
    x = inputs((70,), (100,))
    odd = torch.zeros(70 * 256 + 1).bfloat16()[1:].view(70, 2, 128)
    for first, second in ((x.q, odd), (odd, x.q)):
        settled = Settled()
        key, _ = settled.find(x.cache, (first,), None, ())
        settled.keep(key, "settled")
        assert [settled.find(x.cache, (q,), None, ())[1] for q in (first, second)] == ["settled", None]
    pages = torch.zeros(x.cache.k.numel() + 1).bfloat16()[1:].view(x.cache.k.shape)
    assert PagedKVCache(pages, x.cache.v).metadata != PagedKVCache(torch.zeros_like(pages), x.cache.v).metadata


def test_nothing_is_computed_from_scales_that_make_no_sense():
    x = inputs((70,), (100,), "fp8", "type1")
    with pytest.raises(ValueError, match="softmax_scale"):
        attention_prefill(*arguments(x), scales=x.scales, softmax_scale=-0.1, implementation="hopper")
    q_scale = x.scales.q.clone()
    q_scale[3, 1] = math.nan
    o = attention_prefill(*arguments(x), scales=replace(x.scales, q=q_scale), implementation="hopper")
    assert o[3, 1].isnan().all() and o.isnan().sum() == o.shape[-1]
    negative = replace(x.scales, k=-x.scales.k)
    assert attention_prefill(*arguments(x), scales=negative, implementation="hopper").isnan().all()


@pytest.mark.parametrize(("dtype", "quant"), [("bf16", "-"), ("fp8", "type1")])
@pytest.mark.parametrize("implementation", ["hopper", "portable"])
def test_rows_that_see_nothing_are_zero_whatever_others_see(dtype, quant, implementation):
    """A NaN in V that only other rows see, or nobody; more queries than keys, and a mask of zeros."""
    x = inputs((70,), (20,), dtype, quant)
    v = x.cache.v.clone() if dtype == "bf16" else x.cache.v.view(torch.uint8).clone()
    v[x.block_table[0, 0], 5] = math.nan if dtype == "bf16" else 0x7F
    x = replace(x, cache=replace(x.cache, v=v.view(x.cache.v.dtype)))
    how = dict(scales=x.scales, implementation=implementation)
    o = attention_prefill(*arguments(x), **how)
    assert (o[:50] == 0).all()
    if dtype == "bf16" or implementation == "hopper":  # Triton's interpreter takes the NaN of e4m3 for 480
        assert o[55:].isnan().all()
    mask = torch.zeros(1, 2, 1, 1, dtype=torch.uint8)
    assert (attention_prefill(*arguments(x), block_mask=mask, **how) == 0).all()


def test_full_checks_accept_tokens_behind_the_last_request():
    x = inputs((60,), (100,))
    q = torch.cat([x.q, x.q[:10]])
    o = attention_prefill(q, *arguments(x)[1:], check_inputs="full")
    assert relative_error(o[:60], x.reference()[0]) < cases.BOUND["bf16"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "quant"), [("bf16", "-"), ("fp8", "type0")])
def test_repeated_calls_bind_other_addresses(monkeypatch, dtype, quant, masked):
    """Kernels get the addresses of the new call's tensors and of a workspace of its own."""

    class Recorder:
        def __init__(self, step):
            self.tensors = [x for x in step.args if isinstance(x, torch.Tensor)]

        def arguments(self, tensors, bases):
            return [x if isinstance(x, int) else x.data_ptr() for x in tensors], [x.data_ptr() for x in bases]

    monkeypatch.setattr(hopper, "Bound", Recorder)
    one, two = (inputs((70, 3), (100, 3), dtype, quant, drop=0.5 * masked) for _ in range(2))

    def call_of(x):
        scales = flatten_scales(x.cache, x.scales)
        mask = (x.block_mask,) if masked else (None,)
        return (x.q, x.cache.k, x.cache.v, *arguments(x)[2:], *scales, *mask, 0.1, torch.empty_like(x.q), None)

    first, second = call_of(one), call_of(two)
    calls = hopper.Calls(hopper.launches(*first), first)
    bases = tuple(second[i] for i in (0, 1, 2))
    found, workspace = calls.arguments(second, bases)
    assert [descriptors for _, descriptors in found] == [[]] * (len(found) - 1) + [[x.data_ptr() for x in bases]]
    offsets = set()
    for kernel, (addresses, _) in zip(calls.kernels, found, strict=True):
        for old, address in zip(kernel.tensors, addresses, strict=True):
            place = next((i for i, x in enumerate(first) if x is old), None)
            if place is None:
                offsets.add(address - workspace.data_ptr())
                assert address - workspace.data_ptr() == old.data_ptr() - old.untyped_storage().data_ptr()
            else:
                assert address == second[place].data_ptr()
    assert {0, 16} < offsets and max(offsets) < workspace.numel()


@pytest.mark.parametrize(
    ("quant", "blocks", "expected"),
    [
        ("none", 64, (1, 2, 2, False, True, False)), ("none", 256, (2, 2, 2, False, True, False)),
        ("type0", 256, (2, 3, 2, True, False, True)), ("type1", 256, (2, 3, 2, True, False, False)),
        ("type0", 132, (1, 3, 2, False, False, True)), ("type1", 132, (1, 3, 2, False, False, False)),
    ],
)  # fmt: skip
def test_configuration(quant, blocks, expected):
    assert hopper.configuration(quant, blocks, 132) == expected


def consumer_loops(sass: str) -> list[str]:
    """The code of every loop that computes a tile's exponentials."""
    lines = sass.splitlines()
    bodies = ["\n".join(lines[start : stop + 1]) for start, stop in loops(lines)]
    bodies = [b for b in bodies if b.count("MUFU.EX2") >= 64 and "MMA.64x" in b]
    shortest = min(map(len, bodies))
    return [b for b in bodies if len(b) < 1.5 * shortest]


@pytest.mark.parametrize("variant", variants("hopper prefill"), ids=lambda v: v.name)
def test_machine_code(variant):
    compiled = variant.compile()
    if variant.fn is not hopper.prefill_kernel:
        return
    constants = {variant.fn.arg_names[at[0]]: x for at, x in variant.constexprs.items() if len(at) == 1}
    fp8, groups = constants["QUANT"] != "none", constants["GROUPS"]
    assert compiled.num_warps == (12 if groups == 2 else 8)
    loops = consumer_loops(compiled.sass)
    assert len(loops) == groups
    products = ("QGMMA.64x128x32" if fp8 else "HGMMA.64x128x16", "QGMMA" if fp8 else f"HGMMA.64x{constants['D']}x16")
    for loop in loops:
        assert all(p in loop for p in products) and "STL" not in loop and "LDL" not in loop
        before, _, after = loop.partition(f"WARPGROUP.DEPBAR.LE gsb0, 0x{0 if constants['EARLY'] else 1}")
        assert before.count("MUFU.EX2") >= 56, "exponentials while Q K^T of the next tile is in flight"
        maxima, waited, _ = after.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        assert waited and maxima.count("FMNMX") >= 60, "row maxima while P V is in flight"
        assert loop.count("MOV") < 30, "scores are not moved"
    if fp8:
        assert compiled.families()["LDSM"] == compiled.families()["STSM"] == 16
        assert compiled.sass.count("LDS.U8") <= 2 and not re.search(r"STS\.U(8|16)", compiled.sass), "roles, not bytes"
