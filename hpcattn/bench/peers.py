"""Who computes a workload: our implementations and, found by import, other people's.

An adapter says whether it can run here and on a workload, and turns inputs into a call without arguments that returns
the output, `[tokens, num_q_heads, head_dim]`, at an address that stays the same under a CUDA graph. Everything that a
serving engine does once per step or per model (plans, contiguous copies, broadcast scales) happens in `prepare`; the
call is what is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from hpcattn.bench.provenance import package_version
from hpcattn.bench.workloads import Inputs, Workload
from hpcattn.cache import gather_kv
from hpcattn.decode import attention_decode, decode_workspace
from hpcattn.prefill import attention_prefill
from hpcattn.quantization import dequantize, pad_q_scale, quantize_per_tensor
from hpcattn.schedule import plan_decode, portable_grid

__all__ = ["ADAPTERS", "Adapter", "adapters", "report"]

Call = Callable[[], Tensor]


class Adapter:
    """One implementation with one schedule. Subclasses override what differs."""

    name: str
    schedule = "-"
    module: str | tuple[str, ...] = ()
    ours = False
    capturable = True  # by a CUDA graph

    def imported(self) -> ModuleType:
        """The first of `module` that imports. Raises ImportError."""
        names = (self.module,) if isinstance(self.module, str) else self.module
        for name in names[:-1]:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError:
                continue
        return importlib.import_module(names[-1])

    def available(self) -> tuple[bool, str]:
        """Whether it can run on this machine, and its version or the reason why not."""
        if not torch.cuda.is_available():
            return False, "needs a CUDA GPU"
        try:
            self.imported()
        except ModuleNotFoundError:
            return False, "not installed"
        except Exception as error:  # an extension built for another torch or CUDA
            return False, f"does not import: {error}"
        return True, self.version()

    def version(self) -> str:
        return package_version(self.imported().__name__.partition(".")[0])

    def supports(self, workload: Workload) -> bool:
        raise NotImplementedError

    def page_size(self, workload: Workload) -> int:
        """What the record says: 0 if keys and values are gathered into contiguous memory first."""
        return workload.page_size

    def prepare(self, inputs: Inputs) -> Call:
        raise NotImplementedError


@dataclass(frozen=True)
class Ours(Adapter):
    """`hpcattn.attention_decode` and `attention_prefill`."""

    name: str
    schedule: str = "-"
    ours = True

    @property
    def capturable(self) -> bool:
        return self.name != "reference"  # the oracle reads lengths back

    def available(self) -> tuple[bool, str]:
        if self.name == "hopper":
            if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
                return False, "needs an NVIDIA Hopper GPU"
            if importlib.util.find_spec("hpcattn.kernels.hopper") is None:
                return False, "not part of this version"
        return True, "-"

    def version(self) -> str:
        return "-"

    def supports(self, workload: Workload) -> bool:
        scheduled = workload.suite == "decode" and self.name != "reference"
        return scheduled == (self.schedule != "-")

    def prepare(self, inputs: Inputs) -> Call:
        out = torch.empty(inputs.q.shape, dtype=torch.bfloat16, device=inputs.q.device)
        common = {"scales": inputs.scales, "out": out, "implementation": self.name}
        if inputs.workload.suite == "prefill":
            common["block_mask"] = inputs.block_mask
            position = (inputs.q, inputs.cache, inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
            return lambda: attention_prefill(*position, **common)
        common["num_query_tokens"] = inputs.workload.num_query_tokens
        if self.schedule != "-":
            common["schedule"] = self.schedule
        position = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
        if self.schedule != "-":
            sizes = {"scales": inputs.scales, "num_query_tokens": inputs.workload.num_query_tokens}
            common["plan"] = self.planner(inputs)() if self.schedule == "dynamic" else None
            common["workspace"] = decode_workspace(*position, **sizes, plan=common["plan"], implementation=self.name)
        return lambda: attention_decode(*position, **common)

    def planner(self, inputs: Inputs) -> Callable:
        """A call that (re)builds the plan of a decode in place."""
        workload, arguments = inputs.workload, (inputs.seq_lens, inputs.cache.num_kv_heads)
        plan = plan_decode(
            *arguments,
            query_rows=workload.num_query_tokens * workload.num_q_heads // workload.num_kv_heads,
            dtype=inputs.q.dtype,
            max_seq_len=inputs.block_table.shape[1] * inputs.cache.page_size,
            **(portable_grid(inputs.q.device) if self.name == "portable" else {}),
        )
        return lambda: plan_decode(*arguments, out=plan)


@dataclass(frozen=True)
class TorchSDPA(Adapter):
    """PyTorch's scaled_dot_product_attention over contiguous K and V, one backend at a time; bf16, equal lengths."""

    name: str
    backend: SDPBackend
    module = "torch"

    def available(self) -> tuple[bool, str]:
        if self.backend is SDPBackend.MATH:
            return True, self.version()
        return super().available()

    def supports(self, workload: Workload) -> bool:
        q_len, kv_len = workload.q_lens[0], workload.kv_lens[0]
        uniform = set(workload.q_lens) == {q_len} and set(workload.kv_lens) == {kv_len}
        # cuDNN's causal mask is aligned top-left; the math backend holds the scores
        causal = self.backend is not SDPBackend.CUDNN_ATTENTION or q_len in (1, kv_len)
        fits = self.backend is not SDPBackend.MATH or workload.num_q_heads * q_len * kv_len <= 2**30
        return workload.dtype == "bf16" and not workload.drop and uniform and causal and fits

    def page_size(self, workload: Workload) -> int:
        return 0

    def prepare(self, inputs: Inputs) -> Call:
        batch, kv_len = len(inputs.workload.kv_lens), inputs.workload.kv_lens[0]
        q = inputs.q.unflatten(0, (batch, -1)).transpose(1, 2)
        k, v = (x.transpose(1, 2) for x in _contiguous(inputs))
        q_len = q.shape[2]
        if self.backend is SDPBackend.MATH and q_len > 1:
            mask = {"attn_mask": torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - q_len)}
        elif q_len in (1, kv_len):
            mask = {"is_causal": q_len > 1}
        else:
            mask = {"attn_mask": causal_lower_right(q_len, kv_len)}

        def call() -> Tensor:
            with sdpa_kernel(self.backend):
                o = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask)
            return o.transpose(1, 2).flatten(0, 1)

        return call


@dataclass(frozen=True)
class FlashAttention3(Adapter):
    """FlashAttention-3's flash_attn_with_kvcache, paged or over contiguous K and V; fp8 with type 1 scales.

    It takes one Q scale per request and KV head, so `prepare` quantizes q anew, per tensor; its error includes that.
    """

    contiguous: bool = False
    name = "flash_attn_3"
    module = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")

    def supports(self, workload: Workload) -> bool:
        uniform = len(set(workload.kv_lens)) == 1
        return workload.quant != "type0" and not workload.drop and (uniform or not self.contiguous)

    def page_size(self, workload: Workload) -> int:
        return 0 if self.contiguous else workload.page_size

    def prepare(self, inputs: Inputs) -> Call:
        attend = self.imported().flash_attn_with_kvcache
        workload, q = inputs.workload, inputs.q
        arguments = {"cache_seqlens": inputs.seq_lens, "causal": True}
        if not self.contiguous:
            arguments["page_table"] = inputs.block_table
        if inputs.scales is not None:
            q, q_scale = quantize_per_tensor(dequantize(q, inputs.scales.q, dtype=torch.float32))
            shape = (len(workload.kv_lens), workload.num_kv_heads)
            scales = {"q": q_scale, "k": inputs.scales.k, "v": inputs.scales.v}
            arguments |= {f"{x}_descale": scale.expand(shape).contiguous() for x, scale in scales.items()}
        if workload.suite == "decode":
            q = q.unflatten(0, (len(workload.kv_lens), -1))
        else:
            arguments |= {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max(workload.q_lens)}
        k, v = _contiguous(inputs) if self.contiguous else (inputs.cache.k, inputs.cache.v)
        return lambda: attend(q, k, v, **arguments).view_as(inputs.q)


class FlashInfer(Adapter):
    """FlashInfer's paged prefill wrapper, which serves decode with several query tokens as well; bf16."""

    name = "flashinfer"
    module = "flashinfer"
    workspace_bytes = 256 << 20

    def supports(self, workload: Workload) -> bool:
        return workload.dtype == "bf16" and not workload.drop

    def prepare(self, inputs: Inputs) -> Call:
        cache, device = inputs.cache, inputs.q.device
        pages = -(-inputs.seq_lens // cache.page_size)
        kv_indptr = F.pad(pages.cumsum(0), (1, 0)).int()
        used = torch.arange(inputs.block_table.shape[1], device=device) < pages[:, None]
        wrapper = self.imported().BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device), cache.layout
        )
        wrapper.plan(
            inputs.cu_seqlens_q,
            kv_indptr,
            inputs.block_table[used],
            (inputs.seq_lens - 1) % cache.page_size + 1,
            inputs.workload.num_q_heads,
            cache.num_kv_heads,
            cache.head_dim,
            cache.page_size,
            causal=True,
            q_data_type=inputs.q.dtype,
        )
        out = torch.empty_like(inputs.q)
        kv = tuple(x if cache.layout == "NHD" else x.transpose(1, 2) for x in (cache.k, cache.v))
        return lambda: wrapper.run(inputs.q, kv, out=out)


@dataclass(frozen=True)
class HpcOps(Adapter):
    """Tencent's HPC-Ops (package `hpc`): decode with its static or dynamic schedule, and prefill (schedule "-")."""

    schedule: str = "-"
    name = "hpc_ops"
    module = "hpc"

    def supports(self, workload: Workload) -> bool:
        decode = workload.suite == "decode" and workload.page_size == 64
        masked = bool(workload.drop) and workload.dtype == "bf16"  # its block masks are fp8 only
        prefill = workload.suite == "prefill" and workload.page_size in (32, 64) and not masked
        return workload.head_dim == 128 and (decode if self.schedule != "-" else prefill)

    def prepare(self, inputs: Inputs) -> Call:
        hpc, workload = self.imported(), inputs.workload
        out = torch.empty(inputs.q.shape, dtype=torch.bfloat16, device=inputs.q.device)
        cache = (inputs.q, inputs.cache.k, inputs.cache.v)
        fp8 = ()
        if inputs.scales is not None:
            members = list(hpc.QuantType)  # 0: type 0; 1: type 1
            quant_type = members[int(inputs.scales.quant == "type1")]
            k_scale = inputs.cache.k_scale if inputs.scales.k is None else inputs.scales.k
            if k_scale.dim() == 4 and workload.suite == "decode":
                k_scale = k_scale.view(inputs.q.dtype)
            fp8 = (k_scale, inputs.scales.v)
        if workload.suite == "decode":
            common = {"mtp": workload.num_query_tokens - 1, "new_kv_included": True, "output": out}
            common["task_map"] = self.planner(inputs)() if self.schedule == "dynamic" else None
            if fp8:
                arguments = (*cache, inputs.block_table, inputs.seq_lens, inputs.scales.q, *fp8)
                return lambda: hpc.attention_decode_fp8(*arguments, quant_type=quant_type, **common)
            return lambda: hpc.attention_decode_bf16(*cache, inputs.block_table, inputs.seq_lens, **common)
        where = (inputs.cu_seqlens_q, inputs.block_table, inputs.seq_lens, max(workload.q_lens))
        if not fp8:
            return lambda: hpc.attention_with_kvcache_prefill_bf16(*cache, *where, output=out)
        pad = -(-max(workload.q_lens) // 128) * 128
        arguments = (*cache, pad_q_scale(inputs.scales.q, inputs.cu_seqlens_q, pad), *fp8, *where)
        options = {"quant_type": quant_type, "output": out}
        if inputs.block_mask is None:
            return lambda: hpc.attention_with_kvcache_prefill_fp8(*arguments, **options)
        options["block_mask"] = inputs.block_mask
        return lambda: hpc.attention_with_kvcache_blocksparse_prefill_fp8(*arguments, **options)

    def version(self) -> str:
        try:
            return importlib.import_module("hpc.version").version
        except ImportError:
            return super().version()

    def planner(self, inputs: Inputs) -> Callable:
        """A call that (re)builds the task map of the dynamic schedule."""
        hpc, workload = self.imported(), inputs.workload
        sizes = (len(workload.kv_lens), max(workload.kv_lens), workload.num_kv_heads)
        task_map = hpc.get_attention_decode_task_workspace(*sizes)
        options = (workload.num_kv_heads, workload.num_query_tokens, True)  # its `mtp` here counts query tokens

        def plan() -> Tensor:
            hpc.assign_attention_decode_task(inputs.seq_lens, task_map, *options)
            return task_map

        return plan


def _contiguous(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """K and V of requests of one length, `[batch, kv_len, num_kv_heads, head_dim]`."""
    gathered = [gather_kv(inputs.cache, inputs.block_table, b, n) for b, n in enumerate(inputs.workload.kv_lens)]
    return torch.stack([k for k, _, _ in gathered]), torch.stack([v for _, v, _ in gathered])


ADAPTERS: tuple[Adapter, ...] = (
    *(Ours(name, schedule) for name in ("hopper", "portable") for schedule in ("dynamic", "static", "-")),
    Ours("reference"),
    HpcOps("dynamic"),
    HpcOps("static"),
    HpcOps(),
    FlashAttention3(),
    FlashAttention3(contiguous=True),
    FlashInfer(),
    TorchSDPA("torch_sdpa_flash", SDPBackend.FLASH_ATTENTION),
    TorchSDPA("torch_sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
    TorchSDPA("torch_sdpa_math", SDPBackend.MATH),
)


def adapters(names: list[str] | None = None) -> list[Adapter]:
    """The adapters of these implementations, all if None. Raises ValueError for an unknown name."""
    known = {adapter.name for adapter in ADAPTERS}
    if unknown := set(names or ()) - known:
        raise ValueError(f"implementations must be among {sorted(known)}, got {sorted(unknown)}")
    return [adapter for adapter in ADAPTERS if names is None or adapter.name in names]


def report() -> dict[str, tuple[bool, str]]:
    """Per implementation, whether it can run here, and its version or the reason why not."""
    return {adapter.name: adapter.available() for adapter in ADAPTERS}
