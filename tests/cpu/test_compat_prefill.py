"""`hpcattn.compat.hpc`: HPC-Ops' prefill functions, held to the oracle; memory that may not be read is NaN."""

import inspect
import math
from itertools import product

import cases
import pytest
import torch

import hpcattn.compat.hpc as hpc
from hpcattn import PackedKV, attention_prefill_reference, relative_error
from hpcattn.bench.workloads import Workload
from hpcattn.compat.hpc import QuantType
from hpcattn.quantization import FP8, pad_q_scale

TYPE0 = QuantType.QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD
TYPE1 = QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR
FORMATS, LAYOUTS, BOTH = ("-", "type0", "type1"), ("NHD", "HND"), (False, True)
FP8_NAMES = ("q", "kcache", "vcache", "qscale", "kscale", "vscale", "cu_seqlens_q", "block_ids", "seqlens_kvcache")

PARAMETERS = {  # HPC-Ops at commit 6e2eced: names, and the defaults of the last ones
    "attention_prefill_bf16": (
        ("q", "k", "v", "seqlens_q", "cu_seqlens_q", "max_seqlens_q"),
        {"output": None},
    ),
    "attention_with_kvcache_prefill_bf16": (
        ("q", "kcache", "vcache", "cu_seqlens_q", "block_ids", "seqlens_kvcache", "max_seqlens_q"),
        {"output": None},
    ),
    "attention_with_kvcache_prefill_fp8": (
        (*FP8_NAMES, "max_seqlens_q"),
        {"quant_type": TYPE1, "output": None},
    ),
    "attention_with_kvcache_blocksparse_prefill_fp8": (
        (*FP8_NAMES, "max_seqlens_q"),
        {"quant_type": TYPE1, "block_mask": None, "output": None},
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_signatures(name):
    names, defaults = PARAMETERS[name]
    expected = dict.fromkeys(names, inspect.Parameter.empty) | defaults
    parameters = inspect.signature(getattr(hpc, name)).parameters
    assert [(p.name, p.default) for p in parameters.values()] == list(expected.items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    assert name in hpc.__all__


def build(quant="-", layout="NHD", q_lens=(70, 1, 33), kv_lens=(150, 40, 33), heads=2, group=2, page=64, dim=128):
    workload = Workload(
        suite="prefill", case="v_mean=1.0", q_lens=q_lens, kv_lens=kv_lens, quant=quant, layout=layout, head_dim=dim,
        dtype="bf16" if quant == "-" else "fp8", num_q_heads=heads * group, num_kv_heads=heads, page_size=page,
    )  # fmt: skip
    return cases.build(workload, "cpu")


def arguments(x, pad=128) -> dict:
    """The inputs under HPC-Ops' names; type 0 K scales as bytes."""
    args = dict(q=x.q, kcache=x.cache.k, vcache=x.cache.v, cu_seqlens_q=x.cu_seqlens_q, block_ids=x.block_table)
    args |= dict(seqlens_kvcache=x.seq_lens, max_seqlens_q=max(x.workload.q_lens))
    if x.scales is not None:
        type0 = x.workload.quant == "type0"
        pad = -(-max(x.workload.q_lens) // pad) * pad
        args |= dict(qscale=pad_q_scale(x.scales.q, x.cu_seqlens_q, pad), vscale=x.scales.v)
        args |= dict(kscale=x.cache.k_scale.view(FP8) if type0 else x.scales.k, quant_type=TYPE0 if type0 else TYPE1)
    return args


def prefill(args: dict, **changes):
    args = args | changes
    if "block_mask" in args:
        return hpc.attention_with_kvcache_blocksparse_prefill_fp8(**args)
    if "qscale" in args:
        return hpc.attention_with_kvcache_prefill_fp8(**args)
    return hpc.attention_with_kvcache_prefill_bf16(**args)


def hold(out, x, implementation="auto", expected=None):
    expected = x.reference()[0] if expected is None else expected
    rounded_p = implementation == "portable" and x.workload.dtype == "fp8"
    assert out.dtype == torch.bfloat16 and out.shape == x.q.shape
    assert relative_error(out, expected) < (cases.PLAIN_BOUND if rounded_p else cases.BOUND["bf16"])


@pytest.fixture(params=["auto", "portable"])
def implementation(request, monkeypatch):
    monkeypatch.setattr(hpc, "IMPLEMENTATION", request.param)
    return request.param


def packed(q_lens=(70, 0, 1, 130), group=2, dim=128):
    """q, k and v as slices of one tensor, and the starts of the requests."""
    qkv = torch.randn(sum(q_lens), 2 * group + 4, dim).bfloat16()
    q, k, v = qkv.split((2 * group, 2, 2), dim=1)
    lens = torch.tensor(q_lens, dtype=torch.int32)
    starts = torch.cat([lens[:0].new_zeros(1), lens.cumsum(0)]).to(torch.int32)
    return dict(q=q, k=k, v=v, seqlens_q=lens, cu_seqlens_q=starts, max_seqlens_q=max(lens))


@pytest.mark.parametrize(("group", "dim"), [(2, 128), (1, 64)])
def test_packed(group, dim, implementation):
    args = packed(group=group, dim=dim)
    out = torch.full(args["q"].shape, math.nan, dtype=torch.bfloat16)
    assert hpc.attention_prefill_bf16(*args.values(), out) is out
    expected, _ = attention_prefill_reference(
        args["q"], PackedKV(args["k"], args["v"]), None, args["cu_seqlens_q"], None
    )
    assert relative_error(out, expected) < cases.BOUND["bf16"]
    assert torch.equal(hpc.attention_prefill_bf16(**args | {"max_seqlens_q": 130}), out)


@pytest.mark.parametrize(("quant", "layout", "page"), list(product(FORMATS, LAYOUTS, (16, 32, 64, 128, 256))))
def test_paged(quant, layout, page):
    x = build(quant, layout, page=page)
    args, out = arguments(x, pad=4), torch.full_like(x.q, math.nan, dtype=torch.bfloat16)
    assert prefill(args, output=out) is out
    hold(out, x)
    for longest in (torch.tensor(70), torch.tensor([70], dtype=torch.int32), 2**20):
        assert torch.equal(prefill(args, max_seqlens_q=longest), out)
    if quant != "-":
        assert torch.equal(prefill(args, block_mask=None), out)
        as_bytes = {name: args[name].view(torch.uint8) for name in ("kcache", "vcache")}
        assert torch.equal(prefill(args, **as_bytes), out)


@pytest.mark.parametrize(("quant", "layout"), list(product(FORMATS, LAYOUTS)))
def test_portable_kernels(quant, layout, monkeypatch):
    monkeypatch.setattr(hpc, "IMPLEMENTATION", "portable")
    x = build(quant, layout, q_lens=(40, 0, 3), kv_lens=(100, 7, 3), page=32)
    hold(prefill(arguments(x)), x, "portable")


def test_positional_arguments():
    x = build("type0")
    args, out = arguments(x), torch.empty(x.q.shape, dtype=torch.bfloat16)
    given = [args[name] for name in FP8_NAMES]
    hold(hpc.attention_with_kvcache_prefill_fp8(*given, 70, TYPE0, out), x)
    mask = torch.ones(3, 4, 1, 2, dtype=torch.uint8)
    hold(hpc.attention_with_kvcache_blocksparse_prefill_fp8(*given, 70, TYPE0, mask, out), x)
    x = build()
    names, _ = PARAMETERS["attention_with_kvcache_prefill_bf16"]
    hold(hpc.attention_with_kvcache_prefill_bf16(*(arguments(x)[name] for name in names), out), x)


def test_what_hpc_ops_gets_wrong(implementation):
    """More queries than keys, and no key at all: the rows that see nothing are 0, and nothing hangs."""
    x = build("type1", q_lens=(5, 3), kv_lens=(2, 0))
    out = prefill(arguments(x))
    hold(out, x, implementation)
    assert not out[:3].any() and not out[5:].any() and out[3:5].any()


def test_scales():
    """K scales by their own strides, of one element or none; q scales per token or padded, too short ones give NaN."""
    x = build("type0", page=64)
    args, scale = arguments(x), x.cache.k_scale
    odd = torch.full((*scale.shape[:3], 40), math.nan).transpose(1, 2).contiguous().transpose(1, 2)[..., 4:36]
    rows = torch.full((scale.shape[0], 66, 2, 32), math.nan)[:, 64:]  # where decode has them
    for strided in (odd, rows):
        strided.copy_(scale)
        for version in (strided, strided.view(FP8), strided.view(torch.uint8)):
            hold(prefill(args, kscale=version), x)
    out = prefill(args)
    assert torch.equal(prefill(args, qscale=x.scales.q), out)
    short = prefill(args, qscale=args["qscale"][..., :40].contiguous())
    assert short[:70].isnan().all() and torch.equal(short[70:], out[70:])
    x = build("type1")
    hold(prefill(arguments(x), kscale=x.scales.k[0], vscale=x.scales.v[0]), x)


def by_the_rule(mask, x):
    """The mask that HPC-Ops applies, tile by tile: all the columns that its loop over the keys can reach."""
    columns = -(-x.block_table.shape[1] * x.workload.page_size // 128) + 1
    full = torch.zeros(*mask.shape[:3], columns, dtype=torch.uint8)
    for (b, n), row in product(enumerate(x.workload.kv_lens), range(mask.shape[2])):
        reach = -(-(n - x.workload.q_lens[b] + 128 * (row + 1)) // 128)
        for h, tile in product(range(mask.shape[1]), range(min(max(reach, 0), columns))):
            short = tile >= mask.shape[3]
            full[b, h, row, tile] = tile == mask.shape[3] if short else mask[b, h, row, tile] != 0
    return full


@pytest.mark.parametrize(("quant", "columns"), list(product(("type0", "type1"), (1, 2, 3, 4, 5, 9))))
def test_masks_of_every_width(quant, columns):
    x = build(quant, q_lens=(140, 20, 129), kv_lens=(520, 300, 129), page=32)
    mask = (torch.rand(3, 4, 2, columns) < 0.5).to(torch.uint8) * 3
    options = dict(scales=x.scales, block_mask=by_the_rule(mask, x))
    expected, lse = attention_prefill_reference(x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens, **options)
    out = prefill(arguments(x), block_mask=mask)
    hold(out, x, expected=expected)
    assert bool((lse == -math.inf).any()) and not out[lse == -math.inf].any()  # no active tile
    tall = torch.nn.functional.pad(mask, (0, 0, 0, 2), value=1)
    assert torch.equal(prefill(arguments(x), block_mask=tall, max_seqlens_q=torch.tensor(140)), out)


@pytest.mark.parametrize("quant", ["type0", "type1"])
def test_a_narrow_mask_in_the_portable_kernel(quant, monkeypatch):
    monkeypatch.setattr(hpc, "IMPLEMENTATION", "portable")
    x = build(quant, "HND", q_lens=(30, 2), kv_lens=(400, 257), heads=1, page=128)
    mask = torch.tensor([1, 0, 0, 1], dtype=torch.uint8).view(2, 2, 1, 1)
    options = dict(scales=x.scales, block_mask=by_the_rule(mask, x))
    expected, _ = attention_prefill_reference(x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens, **options)
    hold(prefill(arguments(x), block_mask=mask), x, "portable", expected)


def test_rows_that_the_mask_has_not():
    """Known to be too few: an error. Not known on the host: NaN."""
    x = build("type1", q_lens=(140, 20), kv_lens=(140, 20))
    args, mask = arguments(x), torch.ones(2, 4, 1, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"block_mask must be \[batch, num_q_heads, >= 2, >= 1\], a row for every 128"):
        prefill(args, block_mask=mask)
    out = prefill(args, block_mask=mask, max_seqlens_q=torch.tensor(140))
    assert out[128:140].isnan().all()
    expected = x.reference()[0]
    assert max(relative_error(out[part], expected[part]) for part in (slice(128), slice(140, None))) < 4e-3


def test_nothing_is_copied_or_read_back(monkeypatch):
    """Views only, a mask that is wide enough itself, and no host access to a tensor's content."""
    x, seen = build("type0"), []
    args, wide = arguments(x), torch.ones(3, 4, 1, 2, dtype=torch.uint8)  # 3 pages of 64 tokens
    monkeypatch.setattr(hpc, "attention_prefill", lambda q, cache, *rest, **options: seen.append((cache, options)))
    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__", "contiguous", "clone"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args, name=name: pytest.fail(name))
    for mask in (wide, wide[..., :1]):
        prefill(args, block_mask=mask, max_seqlens_q=torch.tensor(70))
    for cache, options in seen:
        tensors, own = (cache.k, cache.v, cache.k_scale), (x.cache.k, x.cache.v, x.cache.k_scale)
        for tensor, mine in zip(tensors, own, strict=True):
            assert (tensor.data_ptr(), tensor.stride()) == (mine.data_ptr(), mine.stride())
        assert options["scales"].q is args["qscale"] and options["scales"].v is args["vscale"]
    assert seen[0][1]["block_mask"] is wide
    assert seen[1][1]["block_mask"].shape == wide.shape


def test_compiled():
    x = build("type0", q_lens=(40,), kv_lens=(300,))
    args, mask = arguments(x), torch.ones(1, 4, 1, 1, dtype=torch.uint8)
    y, paged = packed(), arguments(build())
    for function in (
        lambda: prefill(args),
        lambda: prefill(args, block_mask=mask),
        lambda: prefill(paged, max_seqlens_q=paged["cu_seqlens_q"].diff().max()),
        lambda: hpc.attention_prefill_bf16(**y),
    ):
        assert torch.equal(torch.compile(function, fullgraph=True, backend="eager")(), function())


def as_in_hpc_ops(num_batch, num_seq_q, num_seq_kv, heads, quant, layout, device):
    """Inputs as HPC-Ops' tests make them: K and V in one tensor, everything finite, unused block ids uninitialised."""
    (num_head_q, num_head_kv), dim, block = heads, 128, 64
    dtype = torch.bfloat16 if quant is None else FP8
    blocks = -(-num_seq_kv // block)
    q = (torch.randn(num_batch * num_seq_q, num_head_q, dim, device=device) / math.sqrt(dim)).to(dtype)
    kvcache = torch.randn(2 * num_batch * blocks, 2, block, num_head_kv, dim, device=device).to(dtype)
    caches = [kvcache[:, 0], kvcache[:, 1]]
    if layout == "HND":
        caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
    block_ids = torch.empty(num_batch, blocks + 1, dtype=torch.int32, device=device)
    used = torch.randperm(2 * num_batch * blocks, device=device)[: num_batch * blocks]
    block_ids[:, :blocks] = used.view(num_batch, blocks)
    seqlens_q = torch.full((num_batch,), num_seq_q, dtype=torch.int32, device=device)
    args = dict(q=q, kcache=caches[0], vcache=caches[1], block_ids=block_ids, max_seqlens_q=max(seqlens_q))
    args["cu_seqlens_q"] = torch.nn.functional.pad(seqlens_q.cumsum(0), (1, 0)).to(torch.int32)
    args["seqlens_kvcache"] = torch.full((num_batch,), num_seq_kv, dtype=torch.int32, device=device)
    if quant is not None:
        pad = -(-num_seq_q // 128) * 128
        args["qscale"] = torch.randn(num_batch, num_head_q, pad, device=device).abs() / 10
        args["quant_type"] = quant
        if quant is TYPE0:
            args["kscale"] = torch.randn(len(kvcache), block // 32, num_head_kv, 32, device=device).abs().view(FP8)
            args["vscale"] = torch.ones(num_head_kv, device=device)
        else:
            args["kscale"], args["vscale"] = torch.rand(1, device=device) * 10, torch.randn(1, device=device)
    return args


def plain(q, kcache, vcache, cu_seqlens_q, block_ids, seqlens_kvcache, quant_type=None, block_mask=None, **scales):
    """What HPC-Ops' tests expect: attention in float32, P rounded to e4m3 against the largest score of its row."""
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    group = q.shape[1] // kcache.shape[2]
    for b, (start, stop) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], strict=True)):
        n, rows = int(seqlens_kvcache[b]), int(stop - start)
        pages = block_ids[b, : -(-n // kcache.shape[1])].long()
        mine = q[start:stop].float()
        k, v = (x[pages].flatten(0, 1)[:n].float() for x in (kcache, vcache))
        if quant_type is not None:
            mine *= scales["qscale"][b, :, :rows].T[..., None]
            k_scale = scales["kscale"]
            if quant_type is TYPE0:
                k_scale = k_scale.view(torch.float32)[pages].transpose(2, 3).flatten(0, 2)[:n, :, None]
            k, v = k * k_scale, v * scales["vscale"][:, None]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        s = torch.einsum("ihd,jhd->hij", mine, k) / math.sqrt(q.shape[2])
        hidden = torch.ones(rows, n, device=q.device).triu(n - rows + 1).bool()
        if block_mask is not None:
            tiles = block_mask[b].repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[..., :n]
            hidden = hidden | (tiles == 0)
        p = (s.masked_fill(hidden, -math.inf) - s.masked_fill(hidden, -math.inf).amax(-1, keepdim=True)).exp()
        rounded = p if quant_type is None else (p * 256).to(FP8).float() / 256
        out[start:stop] = torch.einsum("hij,jhd->ihd", rounded / p.sum(-1, keepdim=True), v)
    return out


def hold_as_hpc_ops(out, args, atol):
    expected = plain(**{name: x for name, x in args.items() if name not in ("max_seqlens_q", "output")})
    assert (out.dtype, out.device, out.shape) == (expected.dtype, expected.device, expected.shape)
    assert torch.allclose(out.float(), expected.float(), rtol=1e-5, atol=atol)


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("num_batch", [1, 4])
@pytest.mark.parametrize("use_output", BOTH)
def test_of_hpc_ops_packed(num_batch, use_output, device):
    args = packed((67,) * num_batch, group=4)
    args = {name: x.to(device) for name, x in args.items()}
    q, k, v, seqlens_q, cu_seqlens_q, max_seqlens_q = args.values()
    if use_output:
        my = torch.empty_like(q, memory_format=torch.contiguous_format)
        hpc.attention_prefill_bf16(q, k, v, seqlens_q, cu_seqlens_q, max_seqlens_q, output=my)
    else:
        my = hpc.attention_prefill_bf16(q, k, v, seqlens_q, cu_seqlens_q, max_seqlens_q)
    pages = torch.arange(num_batch, dtype=torch.int32, device=device)[:, None]
    k, v = (x.unflatten(0, (num_batch, 67)) for x in (k, v))
    hold_as_hpc_ops(my, dict(q=q, kcache=k, vcache=v, cu_seqlens_q=cu_seqlens_q, block_ids=pages,
                             seqlens_kvcache=seqlens_q), 0.016)  # fmt: skip


@DEVICES
@pytest.mark.parametrize(("num_batch", "num_seq_q"), [(1, 100), (2, 33), (4, 100)])
def test_of_hpc_ops_bf16(num_batch, num_seq_q, device):
    args = as_in_hpc_ops(num_batch, num_seq_q, 150, (4, 1), None, "NHD", device)
    my = torch.empty_like(args["q"])
    prefill(args, output=my)
    hold_as_hpc_ops(my, args, 0.016)


@DEVICES
@pytest.mark.parametrize(("quant", "layout", "num_seq_q"), list(product((TYPE0, TYPE1), LAYOUTS, (100, 190))))
def test_of_hpc_ops_fp8(quant, layout, num_seq_q, device):
    args = as_in_hpc_ops(2, num_seq_q, 190, (8, 2), quant, layout, device)
    hold_as_hpc_ops(prefill(args), args, 0.05)


@DEVICES
@pytest.mark.parametrize(("quant", "layout", "skip"), list(product((TYPE0, TYPE1), LAYOUTS, (0.0, 0.5))))
def test_of_hpc_ops_blocksparse(quant, layout, skip, device):
    num_seq = 300
    args = as_in_hpc_ops(2, num_seq, num_seq, (4, 1), quant, layout, device) | {"max_seqlens_q": num_seq}
    args["block_mask"] = None
    if skip:
        mask = torch.rand(2, 4, 3, 3, device=device) >= skip
        args["block_mask"] = (mask | torch.eye(3, dtype=torch.bool, device=device)).tril().to(torch.uint8)
    hold_as_hpc_ops(prefill(args), args, 0.1)


MASK = torch.ones(3, 4, 1, 2, dtype=torch.uint8)
WRONG_CALLS = [
    ("-", dict(q=None), TypeError, "q must be a torch.Tensor, got NoneType"),
    ("-", dict(q=torch.zeros(104, 4, 128)), TypeError, "q must have dtype torch.bfloat16"),
    ("-", dict(q=torch.zeros(104, 3, 128).bfloat16()), ValueError, "GQA ratio"),
    ("-", dict(kcache=torch.zeros(2, 64, 2, 128)), TypeError, "kcache must have dtype torch.bfloat16"),
    ("-", dict(kcache=torch.zeros(64, 2, 128).bfloat16()), ValueError, "kcache must have shape"),
    ("-", dict(vcache=torch.zeros(1, 64, 2, 128).bfloat16()), ValueError, "vcache must have shape"),
    ("-", dict(cu_seqlens_q=[0, 104]), TypeError, "cu_seqlens_q must be a torch.Tensor"),
    ("-", dict(cu_seqlens_q=torch.zeros(4)), TypeError, "cu_seqlens_q must have dtype torch.int32"),
    ("-", dict(block_ids=torch.zeros(3, 3)), TypeError, "block_ids must have dtype torch.int32"),
    ("-", dict(block_ids=torch.zeros(4, 3, dtype=torch.int32)), ValueError, "block_ids must have shape"),
    ("-", dict(seqlens_kvcache=None), TypeError, "seqlens_kvcache must be a torch.Tensor"),
    ("-", dict(seqlens_kvcache=torch.ones(3)), TypeError, "seqlens_kvcache must have dtype torch.int32"),
    ("-", dict(seqlens_kvcache=torch.ones(2, dtype=torch.int32)), ValueError, r"seqlens_kvcache must be \[3\] long"),
    ("-", dict(max_seqlens_q=70.0), ValueError, "max_seqlens_q must be an integer"),
    ("-", dict(max_seqlens_q=-1), ValueError, "max_seqlens_q must be an integer, not negative"),
    ("-", dict(max_seqlens_q=torch.ones(3, dtype=torch.int32)), ValueError, "max_seqlens_q must be an integer or"),
    ("-", dict(output=torch.zeros(104, 4, 128)), TypeError, "output must have dtype torch.bfloat16"),
    ("-", dict(output=torch.zeros(4, 104, 128).bfloat16().transpose(0, 1)), ValueError, "output must be contiguous"),
    ("type0", dict(q=torch.zeros(104, 4, 128).bfloat16()), TypeError, "q must have dtype torch.float8_e4m3fn"),
    ("type0", dict(kcache=torch.zeros(8, 64, 2, 128)), TypeError, "kcache must have dtype"),
    ("type0", dict(kcache=torch.zeros(64, 2, 128).to(FP8)), ValueError, r"kcache must be \[num_pages, page_size"),
    ("type0", dict(kscale=torch.ones(1)), ValueError, r"kscale must have shape \[\d+, 2, 2, 32\]"),
    ("type0", dict(kscale=torch.ones(8, 2, 2, 64).bfloat16()), TypeError, "kscale must have dtype"),
    ("type0", dict(vscale=torch.ones(1)), ValueError, r"vscale must have shape \[2\]"),
    ("type0", dict(quant_type=0), TypeError, "quant_type must be a QuantType"),
    ("type0", dict(quant_type=QuantType.QPERTENSOR_KPERTENSOR_VPERTENSOR), ValueError, "quant_type must be one of"),
    ("type1", dict(qscale=torch.ones(3, 8)), ValueError, "qscale must have shape"),
    ("type1", dict(qscale=torch.ones(3, 128, 4).transpose(1, 2)), ValueError, "qscale must be contiguous"),
    ("type1", dict(kscale=torch.ones(2)), ValueError, r"kscale must have shape \[1\]"),
    ("type1", dict(quant_type=TYPE0), ValueError, "kscale must have shape"),
    ("type1", dict(block_mask=MASK.bool()), TypeError, "block_mask must have dtype torch.uint8"),
    ("type1", dict(block_mask=MASK[:, :2]), ValueError, r"block_mask must have shape \[3, 4, \*, \*\].*2, 1, 2"),
    ("type1", dict(block_mask=MASK[0]), ValueError, "block_mask must have shape"),
    ("type1", dict(block_mask=MASK[..., :0]), ValueError, "block_mask must be .* >= 1"),
    ("type1", dict(block_mask=MASK.repeat(1, 1, 1, 2)[..., ::2]), ValueError, "block_mask must have a last dimension"),
    ("type1", dict(block_mask=MASK, kcache=torch.zeros(128).to(FP8)), ValueError, r"kcache must be \[num_pages"),
    ("type1", dict(block_mask=MASK, block_ids=None), TypeError, "block_ids must be a torch.Tensor"),
    ("type1", dict(block_mask=MASK, q=torch.zeros(8, 128).to(FP8)), ValueError, r"q must be \[total_q"),
]


@pytest.mark.parametrize(("quant", "change", "error", "message"), WRONG_CALLS)
def test_wrong_arguments(quant, change, error, message):
    with pytest.raises(error, match=message):
        prefill(arguments(build(quant)), **change)


def test_k_scales_that_are_no_view():
    x = build("type0")
    with pytest.raises(ValueError, match="kscale must be aligned to 4 bytes"):
        odd = torch.zeros(x.cache.k_scale.numel() * 4 + 1, dtype=torch.uint8)[1:]
        prefill(arguments(x), kscale=odd.view(*x.cache.k_scale.shape[:3], 128))


WRONG_PACKED = [
    (dict(k=torch.zeros(201, 2, 128)), TypeError, "k must have dtype torch.bfloat16"),
    (dict(k=torch.zeros(200, 2, 128).bfloat16()), ValueError, r"k must have shape \[201"),
    (dict(v=torch.zeros(201, 1, 128).bfloat16()), ValueError, r"v must have shape \[201, 2, 128\]"),
    (dict(q=torch.zeros(201, 4, 128)), TypeError, "q must have dtype torch.bfloat16"),
    (dict(seqlens_q=None), TypeError, "seqlens_q must be a torch.Tensor"),
    (dict(seqlens_q=torch.ones(5, dtype=torch.int32)), ValueError, r"seqlens_q must have shape \[4\]"),
    (dict(cu_seqlens_q=None), TypeError, "cu_seqlens_q must be a torch.Tensor"),
    (dict(max_seqlens_q=None), ValueError, "max_seqlens_q must be an integer"),
    (dict(output=torch.zeros(201, 4, 128)), TypeError, "output must have dtype"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG_PACKED)
def test_wrong_packed_arguments(change, error, message):
    with pytest.raises(error, match=message):
        hpc.attention_prefill_bf16(**packed() | change)
    with pytest.raises(ValueError, match=r"k.shape\[2\], head_dim, must be"):
        hpc.attention_prefill_bf16(**packed(dim=32))
