import re
import subprocess

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from hpcattn import inspection
from hpcattn.inspection import Variant, compile_kernel, record_launches, variants, variants_of
from hpcattn.kernels.jit import jit


@triton.jit
def product(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def hoard(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.load(x + i)
    tl.store(y + i, tl.cumsum(total))


@jit
def scale(x, sizes, factor, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i * sizes[0], tl.load(x + i * sizes[1]) * factor)


@gluon.jit
def copy_tile(source, target, N: gl.constexpr):
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source.nbytes_per_cta)
    tma.async_load(source, [0, 0], bar, tile)
    mbarrier.wait(bar, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    rows = gl.arange(0, N, gl.SliceLayout(1, layout))
    columns = gl.arange(0, N, gl.SliceLayout(0, layout))
    gl.store(target + rows[:, None] * N + columns[None, :], tile.load(layout))


PRODUCT = {"a": "*bf16", "b": "*bf16", "c": "*fp32"}


def test_triton_kernel_uses_the_tensor_cores():
    compiled = compile_kernel(product, PRODUCT, {"N": 64}, num_warps=4)
    assert compiled.families()["HGMMA"] == 4  # 64 of K, 16 an instruction
    assert compiled.opcodes["HGMMA.64x64x16.F32.BF16"] == 4
    assert compiled.shared_bytes >= 2 * 64 * 64 * 2 and compiled.num_warps == 4
    assert compiled.spill_store_bytes == compiled.spill_load_bytes == 0
    assert ".target sm_90a" in compiled.ptx and "EXIT" in compiled.sass and compiled.cubin[:4] == b"\x7fELF"


def test_registers_are_those_of_the_cubin(tmp_path):
    compiled = compile_kernel(product, PRODUCT, {"N": 128}, num_warps=4)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.cubin)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert compiled.registers == int(re.search(r"REG:(\d+)", usage)[1]) > 64
    assert compiled.stack_bytes == int(re.search(r"STACK:(\d+)", usage)[1])


def test_options_reach_the_compiler():
    few = compile_kernel(product, PRODUCT, {"N": 128}, num_warps=4)
    many = compile_kernel(product, PRODUCT, {"N": 128}, num_warps=8)
    assert many.num_warps == 8 and many.registers < few.registers


def test_spills_are_seen():
    compiled = compile_kernel(hoard, {"x": "*fp32", "y": "*fp32"}, {"N": 2048}, num_warps=1, maxnreg=32)
    assert compiled.spill_store_bytes > 0 and compiled.spill_load_bytes > 0 and compiled.stack_bytes > 0
    assert compiled.families()["STL"] > 0 and compiled.registers <= 32


def test_gluon_kernel_with_a_tensor_descriptor():
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    signature = {"source": f"tensordesc<bf16[64,64],{layout!r}>", "target": "*bf16"}
    compiled = compile_kernel(copy_tile, signature, {"N": 64})
    assert compiled.families()["UTMALDG"] == 1 and compiled.families()["SYNCS"] > 0
    assert compiled.shared_bytes >= 64 * 64 * 2


def test_arguments_must_be_complete():
    with pytest.raises(ValueError, match=r"product leave out \['b', 'N'\]"):
        compile_kernel(product, {"a": "*bf16", "c": "*fp32"})
    with pytest.raises(TypeError, match="Triton or Gluon kernel"):
        compile_kernel(len, {})


def launch(x):
    scale[(1,)](x, (2, 3), 0.5, N=128, num_warps=2)


def test_launch_is_recorded_as_a_gpu_would_compile_it():
    x = torch.ones(512)
    with record_launches() as launches:
        launch(x)
    assert [v.name for v in launches] == ["scale"] and torch.equal(x, torch.ones(512))
    assert launches[0].signature["x"] == "*fp32" and launches[0].signature["sizes"] == ("i32", "i32")
    compiled = launches[0].compile()
    assert compiled.num_warps == 2 and compiled.families()["LDG"] > 0
    launch(x)
    assert not torch.equal(x, torch.ones(512))  # launches run again


def test_alignment_decides_how_wide_loads_are():
    def opcodes(x):
        return Variant.from_launch("scale", scale, x, (1, 1), 0.5, N=512, num_warps=4).compile().opcodes

    aligned = torch.ones(1024)
    assert any(o.startswith("LDG.E.128") for o in opcodes(aligned))
    assert not any(o.startswith("LDG.E.128") for o in opcodes(aligned[1:]))


def test_variants_of_names_the_kernels_of_a_call():
    assert [v.name for v in variants_of("half fp32", lambda: launch(torch.ones(512)))] == ["half fp32 scale"]


def test_variants_collects_what_kernel_modules_offer(tmp_path, monkeypatch):
    folder = tmp_path / "some_kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "plain.py").write_text("")
    (folder / "offering.py").write_text(
        "from hpcattn.inspection import Variant\n"
        "def offline_variants():\n"
        "    return [Variant(f'decode {dtype}', None, {}) for dtype in ('bf16', 'fp8')]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(inspection, "kernels", __import__("some_kernels"))
    assert [v.name for v in variants()] == ["decode bf16", "decode fp8"]
    assert [v.name for v in variants("fp8", "decode")] == ["decode fp8"]
    assert variants("prefill") == []


@pytest.fixture
def one_variant(monkeypatch):
    variant = Variant("product bf16", product, PRODUCT, {"N": 64})
    monkeypatch.setattr(inspection, "variants", lambda *words: [variant] * all(w in variant.name for w in words))
    return variant


def test_command_prints_resources_and_instructions(one_variant, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert inspection.main(["product"]) == 0
    text = capsys.readouterr().out
    assert str(one_variant.compile().registers) in text and "HGMMA.64x64x16.F32.BF16" in text


def test_command_prints_code(one_variant, capsys):
    assert inspection.main(["--ptx"]) == 0
    assert ".version" in capsys.readouterr().out
    assert inspection.main(["--sass"]) == 0
    assert "HGMMA" in capsys.readouterr().out


def test_command_names_what_there_is(one_variant, capsys):
    with pytest.raises(SystemExit):
        inspection.main(["prefill"])
    assert "product bf16" in capsys.readouterr().err


@pytest.mark.parametrize("variant", variants(), ids=lambda v: v.name)
def test_every_kernel_compiles_for_hopper_without_spills(variant):
    """But for some prefill kernels, which leave a few words on the stack once per launch, where roles part."""
    compiled = variant.compile()
    parts = "hopper prefill" in variant.name and ("masked" in variant.name or "pages of 16" in variant.name)
    assert compiled.spill_store_bytes <= (64 if parts else 0)
    assert compiled.registers <= 255 and compiled.shared_bytes <= 227 * 1024
