"""Pages, layouts, block tables and appending."""

import pytest
import torch

from hpcattn import PageAllocator, PagedKVCache, append_tokens, gather_kv, make_block_table
from hpcattn.cache import PAGE_SIZES
from hpcattn.quantization import FP8, quantize_per_token_head

LENS = (5, 0, 70, 33)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_layouts_are_strides_of_one_logical_tensor(layout, page_size, joint):
    cache = PagedKVCache.allocate(3, page_size, 2, 128, layout=layout, joint=joint)
    for x in (cache.k, cache.v):
        assert x.shape == (3, page_size, 2, 128) and x.isnan().all()
        token, head = (2 * 128, 128) if layout == "NHD" else (128, page_size * 128)
        assert x.stride() == ((2 if joint else 1) * page_size * 256, token, head, 1)
    assert cache.layout == layout


def test_fp8_scales_lie_in_the_page_as_hpc_ops_has_them():
    """Token t: at byte page * page_stride + (64 + t // 32) * token_stride + head * head_stride + 4 (t % 32)."""
    for layout in ("NHD", "HND"):
        cache = PagedKVCache.allocate(3, 64, 2, 128, dtype=FP8, layout=layout, k_scales="page", fill=0.0)
        cache.k_scale[2, 37 // 32, 1, 37 % 32] = 1.5
        flat = torch.as_strided(cache.k.view(torch.uint8), (3 * 66 * 2 * 128,), (1,), 0)
        page, token, head, _ = cache.k.stride()
        assert (token, head) == ((256, 128) if layout == "NHD" else (128, 66 * 128))
        at = 2 * page + (64 + 37 // 32) * token + head + 4 * (37 % 32)
        assert flat[at : at + 4].view(torch.float32).item() == 1.5
        assert int((flat != 0).sum()) == 2  # 1.5 has two bytes that are not zero


@pytest.mark.parametrize(
    ("change", "word"),
    [(dict(page_size=48), "page_size"), (dict(layout="DHN"), "layout"), (dict(dtype=torch.float16), "dtype"),
     (dict(k_scales="page"), "k_scales")],
)  # fmt: skip
def test_allocate_refuses(change, word):
    args = dict(num_pages=1, page_size=16, num_kv_heads=1, head_dim=128) | change
    sizes = [args.pop(name) for name in ("num_pages", "page_size", "num_kv_heads", "head_dim")]
    with pytest.raises(ValueError, match=f"{word} must be one of"):
        PagedKVCache.allocate(*sizes, **args)


def test_allocator_is_shuffled_seeded_and_honest():
    allocator = PageAllocator(100, seed=1)
    first = allocator.allocate(60)
    assert first == PageAllocator(100, seed=1).allocate(60) != PageAllocator(100, seed=2).allocate(60)
    assert first != sorted(first) and len(set(first)) == 60 and allocator.num_free == 40
    with pytest.raises(MemoryError, match="41 pages wanted, 40 free"):
        allocator.allocate(41)
    with pytest.raises(ValueError, match="negative"):
        allocator.allocate(-1)
    allocator.release(first[:2])
    with pytest.raises(ValueError, match="are free already"):
        allocator.release(first[:1])
    assert allocator.allocate(2) == first[:2][::-1]


def test_block_table():
    table = make_block_table(LENS, 32, num_pages=20, fill=-7)
    assert table.shape == (4, 3) and table.dtype == torch.int32
    used = table[table != -7]
    assert len(set(used.tolist())) == len(used) == 1 + 0 + 3 + 2 and used.max() < 20


@pytest.mark.parametrize("implementation", ["reference", "portable"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("layout", "page_size"), [("NHD", 16), ("HND", 64)])
def test_append_in_two_steps_then_gather(layout, page_size, quantized, implementation):
    dtype = FP8 if quantized else torch.bfloat16
    cache = PagedKVCache.allocate(
        20, page_size, 2, 128, dtype=dtype, layout=layout, k_scales="page" if quantized else None
    )
    table = make_block_table(LENS, page_size, num_pages=20)
    k, v = torch.randn(2, sum(LENS), 2, 128)
    k, k_scale = quantize_per_token_head(k) if quantized else (k.bfloat16(), None)
    v = v.to(dtype)
    rows = torch.split(torch.arange(sum(LENS)), LENS)
    last = [min(n, 3) for n in LENS]
    first = [n - m for n, m in zip(LENS, last, strict=True)]
    for new, kv_lens in ((first, first), (last, LENS)):  # all but three tokens, then those
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        index = torch.cat([r[n - m : n] for r, n, m in zip(rows, kv_lens, new, strict=True)])
        append_tokens(
            cache, k[index], v[index], table, lens, implementation=implementation,
            cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).int(), k_scale=k_scale[index] if quantized else None,
        )  # fmt: skip
    for b, n in enumerate(LENS):
        got_k, got_v, got_scale = gather_kv(cache, table, b, n)
        assert torch.equal(got_k.float(), k[rows[b]].float()) and torch.equal(got_v.float(), v[rows[b]].float())
        if quantized:
            assert torch.equal(got_scale, k_scale[rows[b]])
    assert int((~cache.k.float().isnan()).sum()) == sum(LENS) * 2 * 128, "a slot that belongs to nobody was written"


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_append_drops_what_has_no_place(implementation):
    cache = PagedKVCache.allocate(4, 16, 1, 64)
    table = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    lens = torch.tensor([1, 17, 2], dtype=torch.int32)  # fewer than the two new tokens; too long for the table; fine
    new = torch.arange(6.0).view(6, 1, 1).expand(6, 1, 64).bfloat16()
    append_tokens(cache, new, new, table, lens, num_query_tokens=2, implementation=implementation)
    written = [
        (p, s, float(cache.k[p, s, 0, 0])) for p in range(4) for s in range(16) if not cache.k[p, s].isnan().any()
    ]
    assert written == [(0, 0, 1.0), (2, 0, 4.0), (2, 1, 5.0)]


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_append_ignores_tokens_that_no_request_owns(implementation):
    cache = PagedKVCache.allocate(2, 16, 1, 64)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    new, starts = torch.ones(3, 1, 64).bfloat16(), torch.tensor([0, 1], dtype=torch.int32)
    args = (cache, new, new, table, lens)
    append_tokens(*args, cu_seqlens_q=starts, implementation=implementation)
    assert cache.k[1, 4, 0, 0] == 1 and int((~cache.k.isnan()).sum()) == 64
    with pytest.raises(ValueError, match="cu_seqlens_q must be rising from 0 to 3"):
        append_tokens(*args, cu_seqlens_q=starts, implementation=implementation, check_inputs="full")


def test_append_checks_its_input():
    cache = PagedKVCache.allocate(4, 16, 1, 64)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(TypeError, match="k_new must have dtype torch.bfloat16"):
        append_tokens(cache, torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), table, lens)
    x = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"k_new must have shape \[1, 1, 64\]"):
        append_tokens(cache, x, x, table, lens)
    with pytest.raises(ValueError, match="k_scale must be None"):
        append_tokens(cache, x[:1], x[:1], table, lens, k_scale=torch.ones(1, 1))
