"""Named, seeded workloads: the same objects feed tests, benchmarks and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, product

import torch
from torch import Tensor

from hpcattn.append import append_tokens
from hpcattn.cache import PagedKVCache, make_block_table
from hpcattn.masks import MASK_TILE, random_block_mask, visible_pairs
from hpcattn.quantization import Scales, quantize_per_head, quantize_per_tensor, quantize_per_token_head
from hpcattn.reference import attention_decode_reference, attention_prefill_reference

__all__ = ["DECODE_CASES", "PREFILL_SHAPES", "SUITES", "Inputs", "Workload", "find", "select"]

DECODE_CASES: dict[str, tuple[int, ...]] = {
    "uniform_512": (512,) * 64,
    "uniform_4096": (4096,) * 64,
    "skewed_mix": (128,) * 32 + (4096,) * 32,
    "skewed_extreme": (64,) * 15 + (16384,),
    "one_64k_7x4k": (65536,) + (4096,) * 7,
    "one_64k_15x4k": (65536,) + (4096,) * 15,
    "one_64k_31x4k": (65536,) + (4096,) * 31,
    "one_128k_31x4k": (131072,) + (4096,) * 31,
    "two_32k_30x4k": (32768,) * 2 + (4096,) * 30,
}
SMALL_DECODE_CASES = {"small_uniform": (50, 50), "small_skewed": (3, 17, 130)}

PREFILL_SHAPES = ((127, 127), (512, 4096), (512, 32768))
LONG_PREFILL_SHAPES = ((4096, 4096), (16384, 16384))
SMALL_PREFILL_SHAPES = ((31, 31), (40, 300))
MASK_DROP = 0.75


@dataclass(frozen=True)
class Inputs:
    """Everything one attention call reads. q `[tokens, num_q_heads, head_dim]`, request-major; see `hpcattn.decode`."""

    workload: Workload
    q: Tensor
    cache: PagedKVCache
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    scales: Scales | None
    block_mask: Tensor | None

    def reference(self) -> tuple[Tensor, Tensor]:
        """The float64 oracle's (o, lse) for these inputs."""
        q, cache, table, lens = self.q, self.cache, self.block_table, self.seq_lens
        if self.workload.suite == "decode":
            s = self.workload.num_query_tokens
            return attention_decode_reference(q, cache, table, lens, scales=self.scales, num_query_tokens=s)
        options = {"scales": self.scales, "block_mask": self.block_mask}
        return attention_prefill_reference(q, cache, table, self.cu_seqlens_q, lens, **options)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One configuration to compute and time.

    suite: "decode" or "prefill"; q_lens, kv_lens: per request; dtype: "bf16" or "fp8"; quant: "-", "type0" or "type1";
    layout: "NHD" or "HND"; drop: probability with which the block mask drops a 128 x 128 tile, 0 for no mask.
    """

    suite: str
    case: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    dtype: str = "bf16"
    quant: str = "-"
    layout: str = "NHD"
    head_dim: int = 128
    page_size: int = 64
    drop: float = 0.0
    seed: int = 0

    @property
    def num_query_tokens(self) -> int:
        """S of a decode workload; 0 for prefill."""
        return self.q_lens[0] if self.suite == "decode" else 0

    @property
    def key(self) -> dict[str, str | int]:
        """The columns of a record that say which workload it timed."""
        names = ("suite", "case", "dtype", "quant", "layout", "num_query_tokens", "page_size")
        return {name: getattr(self, name) for name in names}

    @property
    def kv_bytes(self) -> int:
        """Bytes of the visible keys and values, and of the type 0 scales."""
        per_head = 2 * self.head_dim * (1 if self.dtype == "fp8" else 2) + (4 if self.quant == "type0" else 0)
        return sum(self.kv_lens) * self.num_kv_heads * per_head

    @property
    def bytes_moved(self) -> int:
        """Bytes that must cross DRAM once: visible K and V, their type 0 scales, q, and the bf16 output."""
        q_element = 1 if self.dtype == "fp8" else 2
        return self.kv_bytes + sum(self.q_lens) * self.num_q_heads * self.head_dim * (q_element + 2)

    @cached_property
    def flops(self) -> int:
        """4 * head_dim per visible (query, key) pair and head; with a mask, pairs in active tiles only."""
        if not self.drop:
            return 4 * self.head_dim * self.num_q_heads * visible_pairs(self.q_lens, self.kv_lens)
        q_len, kv_len = self.q_lens[0], self.kv_lens[0]
        seen = kv_len - q_len + 1 + torch.arange(q_len)  # keys that each query sees, without the mask
        edges = torch.arange(0, kv_len, MASK_TILE)
        per_query = (seen[:, None] - edges).clamp(0, MASK_TILE)  # [q_len, kv tiles]
        row = torch.arange(q_len) // MASK_TILE
        return 4 * self.head_dim * int((self.block_mask("cpu")[:, :, row] * per_query).sum())

    def floor_us(self, ceilings) -> float:
        """Roofline bound in µs: the later of the DRAM and the tensor-core time (`hpcattn.bench.ceilings.Ceilings`)."""
        return max(self.bytes_moved / ceilings.tb_per_s * 1e-6, self.flops / ceilings.tflop_per_s(self.dtype) * 1e-6)

    def block_mask(self, device: torch.device | str = "cpu") -> Tensor | None:
        """uint8 `[1, num_q_heads, q tiles, kv tiles]`, None if dense; the causal frontier is always kept."""
        if not self.drop:
            return None
        sizes = (self.num_q_heads, self.q_lens[0], self.kv_lens[0])
        return random_block_mask(1, *sizes, drop=self.drop, seed=self.seed, device=device)

    def build(
        self, device: torch.device | str = "cpu", *, poison: bool = True, v_mean: float = 0.0, seed: int | None = None
    ) -> Inputs:
        """The inputs, in shuffled pages of a pool with spare ones.

        poison: everything a call must not read into its result (the tail of last pages, spare pages, spare scales) is
        NaN and spare table entries are -1; otherwise it is finite, as the peers require. Visible content depends only
        on the seed, on v_mean and on the kind of device.
        """
        seed = self.seed if seed is None else seed
        random = torch.Generator(device).manual_seed(seed)

        def normal(tokens: int, heads: int) -> Tensor:
            x = torch.randn(tokens, heads, self.head_dim, generator=random, device=device)
            return x.to(torch.bfloat16)

        q = normal(sum(self.q_lens), self.num_q_heads)
        k = normal(sum(self.kv_lens), self.num_kv_heads)
        v = normal(sum(self.kv_lens), self.num_kv_heads) + v_mean
        scales, k_scale = None, None
        if self.dtype == "fp8":
            q, k, v, scales, k_scale = _quantize(q, k, v, self.quant)
        used = sum(-(-n // self.page_size) for n in self.kv_lens)
        cache = PagedKVCache.allocate(
            used + max(2, used // 8),
            self.page_size,
            self.num_kv_heads,
            self.head_dim,
            dtype=q.dtype,
            layout=self.layout,
            device=device,
            k_scales=None if k_scale is None else ("page" if self.suite == "decode" else "separate"),
            fill=float("nan") if poison else 1.0,
        )
        places = {"num_pages": cache.num_pages, "seed": seed, "fill": -1 if poison else 0}
        table = make_block_table(self.kv_lens, self.page_size, device=device, **places)
        seq_lens = torch.tensor(self.kv_lens, dtype=torch.int32, device=device)
        append_tokens(
            cache, k, v, table, seq_lens, cu_seqlens_q=_cumulative(self.kv_lens, device), k_scale=k_scale,
            implementation="reference",
        )  # fmt: skip
        cu_seqlens_q = _cumulative(self.q_lens, device)
        return Inputs(self, q, cache, table, seq_lens, cu_seqlens_q, scales, self.block_mask(device))

    def build_many(self, count: int, device: torch.device | str = "cpu", **kwargs) -> list[Inputs]:
        """`count` input sets in memory of their own, from successive seeds, for timing with a cold L2."""
        return [self.build(device, seed=self.seed + i, **kwargs) for i in range(count)]


def _quantize(q: Tensor, k: Tensor, v: Tensor, quant: str):
    """(q, k, v in e4m3, Scales, k scale per token and head or None)."""
    q, q_scale = quantize_per_token_head(q)
    k, k_scale = (quantize_per_token_head if quant == "type0" else quantize_per_tensor)(k)
    v, v_scale = (quantize_per_head if quant == "type0" else quantize_per_tensor)(v)
    if quant == "type0":
        return q, k, v, Scales(q_scale, v_scale), k_scale
    return q, k, v, Scales(q_scale, v_scale, k_scale), None


def _cumulative(lens: Sequence[int], device) -> Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)


FORMATS = (("bf16", "-"), ("fp8", "type0"), ("fp8", "type1"))
LAYOUTS = ("NHD", "HND")


def _decode(
    cases: dict[str, tuple[int, ...]], page_size: int, query_tokens: dict[str, Sequence[int]]
) -> Iterator[Workload]:
    for (dtype, quant), layout, (case, kv_lens) in product(FORMATS, LAYOUTS, cases.items()):
        for s in query_tokens[dtype]:
            yield Workload(
                suite="decode", case=case, q_lens=(s,) * len(kv_lens), kv_lens=kv_lens, dtype=dtype, quant=quant,
                layout=layout, num_q_heads=8, num_kv_heads=1, page_size=page_size,
            )  # fmt: skip


def _prefill(shapes, heads: tuple[int, int], page_size: int, formats, drops: Sequence[float]) -> Iterator[Workload]:
    for (dtype, quant), layout, (q_len, kv_len), drop in product(formats, LAYOUTS, shapes, drops):
        yield Workload(
            suite="prefill", case=f"{q_len}x{kv_len}" + ("-masked" if drop else ""), q_lens=(q_len,), kv_lens=(kv_len,),
            dtype=dtype, quant=quant, layout=layout, num_q_heads=heads[0], num_kv_heads=heads[1], page_size=page_size,
            drop=drop,
        )  # fmt: skip


SUITES: dict[str, tuple[Workload, ...]] = {
    "decode": tuple(_decode(DECODE_CASES, 64, {"bf16": (1, 2, 3), "fp8": (1, 2, 4)})),
    "prefill": (
        *_prefill(PREFILL_SHAPES, (32, 4), 64, FORMATS[1:], (0.0, MASK_DROP)),
        *_prefill(LONG_PREFILL_SHAPES, (32, 4), 64, FORMATS[1:], (0.0,)),
        *_prefill((*PREFILL_SHAPES, *LONG_PREFILL_SHAPES), (32, 4), 64, FORMATS[:1], (0.0,)),
    ),
    "decode_small": tuple(_decode(SMALL_DECODE_CASES, 16, {"bf16": (1, 2), "fp8": (1,)})),
    "prefill_small": tuple(_prefill(SMALL_PREFILL_SHAPES, (4, 1), 32, FORMATS, (0.0, MASK_DROP))),
}


IDENTITY = ("case", "dtype", "quant", "layout", "num_query_tokens")


@cache
def _by_identity() -> dict[tuple, Workload]:
    return {tuple(w.key[c] for c in IDENTITY): w for suite in SUITES.values() for w in suite}


def find(row) -> Workload | None:
    """The workload that a record timed, from its columns as attributes; None if it is not one of `SUITES`."""
    return _by_identity().get(tuple(getattr(row, c) for c in IDENTITY))


def select(suite: str, **fields) -> list[Workload]:
    """Workloads of a suite whose fields equal those given: `select("decode", case="uniform_512", layout="NHD")`."""
    return [w for w in SUITES[suite] if all(getattr(w, name) == value for name, value in fields.items())]
