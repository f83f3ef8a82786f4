"""Lesson 04a: its kernels run, its mistakes are caught where it says so, its counts agree with the compiler."""

import importlib.util
from functools import partial
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hpcattn import emulator
from hpcattn.emulator import Deadlock, UnwrittenRead
from hpcattn.inspection import Variant
from hpcattn.lessons import exercise, primer, primer_figures
from hpcattn.lessons.primer_kernels import transpose_rounds

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SEEDS = range(len(emulator.scheduler.KINDS))
EARLY = emulator.scheduler.KINDS.index("early copies")
SWIZZLED = gl.NVMMASharedLayout(128, 16, 2)
ROWS_OF_64 = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
ROWS_OF_128 = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
MMA = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
MMA_8 = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])


def cells(notebook: str) -> list[str]:
    return [c.source for c in nbformat.read(NOTEBOOKS / notebook, as_version=4).cells if c.cell_type == "code"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The Gluon kernels as the notebook defines them, in a module: the compiler wants to read their source."""
    sources = cells("04a_gluon_primer.ipynb")
    imports = sources[0].partition("lesson = begin")[0]
    path = tmp_path_factory.mktemp("primer") / "primer_cells.py"
    path.write_text("\n\n".join([imports, *(s for s in sources if s.startswith("@gluon.jit"))]))
    spec = importlib.util.spec_from_file_location("primer_cells", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def tiles(n: int):
    """Tiles [64, 64] one below the other, their descriptor, and room for the result."""
    x = random(64 * n, 64)
    return x, TensorDescriptor.from_tensor(x, [64, 64], SWIZZLED), torch.zeros_like(x)


def launch(kernel, *args, seed=0, **constants):
    emulator.launch(kernel, (1,), *args, **constants, num_warps=4, schedule_seed=seed)


def compiled(kernel, *args, **constants):
    return Variant.from_launch(kernel.__name__, kernel, *args, **constants, num_warps=4).compile()


# --- Layouts and banks


def test_bases_combine_by_xor():
    assert primer.place(MMA, [64, 64], warp=1, lane=5, register=3) == (25, 3)
    assert primer.registers(MMA, [64, 64]) == 32 and primer.registers(MMA_8, [64, 8]) == 4
    assert primer.registers(ROWS_OF_64, [64, 64], bits=16) == 16
    own = gl.DistributedLinearLayout([[0, 1]], [[0, 2], [1, 0], [2, 0], [0, 0], [0, 0]], [], [], [4, 4])
    assert primer.bases(own, [4, 4]) is own
    assert primer.held(own, [4, 4]).shape == (1, 32, 2, 2)


@pytest.mark.parametrize("layout", [ROWS_OF_64, MMA])
def test_a_slice_is_held_by_those_who_hold_the_row(layout):
    tile, rows = primer.held(layout, [64, 64]), primer.held(gl.SliceLayout(1, layout), [64])
    for row in (0, 5, 63):
        holders = {tuple(map(int, at[:2])) for at in np.argwhere(tile[..., 0] == row)}
        assert holders == {tuple(map(int, at[:2])) for at in np.argwhere(rows[..., 0] == row)}


def test_the_128_byte_swizzle():
    offsets = primer.shared_offsets(SWIZZLED, [64, 128])
    row, column = np.mgrid[:64, :64]
    expected = row * 64 + ((column // 8) ^ (row % 8)) * 8 + column % 8
    assert (offsets[:, :64] == expected).all() and (offsets[:, 64:] == expected + 64 * 64).all()
    chunks = range(8)
    assert [primer.wavefronts(primer.column_read(SWIZZLED, [64, 64], c), 16) for c in chunks] == [1] * 8
    flat = gl.NVMMASharedLayout(0, 16, 2)
    assert [primer.wavefronts(primer.column_read(flat, [64, 64], c), 16) for c in chunks] == [8] * 8


def test_wavefronts():
    lane = np.arange(32)
    assert primer.wavefronts(4 * lane, 4) == 1
    assert primer.wavefronts(0 * lane, 4) == 1  # one word for all
    assert primer.wavefronts(2 * lane, 2) == 1  # two lanes share a word
    assert primer.wavefronts(8 * lane, 4) == 2
    assert primer.wavefronts(128 * lane, 4) == primer.wavefronts(128 * lane, 2) == 32
    assert primer.wavefronts(8 * lane, 8) == 2 and primer.wavefronts(16 * lane, 16) == 4  # 256 and 512 bytes
    assert primer.wavefronts(128 * lane, 16) == 32


@pytest.mark.parametrize("name", primer.SHARED_LAYOUTS)
def test_conflicts_as_the_compiler_counts_them(kernels, name):
    shared, out = primer.SHARED_LAYOUTS[name], torch.zeros(1, dtype=torch.int32)
    launch(kernels.count_conflicts, out, N=64, LAYOUT=primer.THREAD_LAYOUT, SHARED=shared)
    load = primer.access(primer.THREAD_LAYOUT, shared, 64, 2, transposed=True)
    assert out.item() + 1 == load.ways == {"plain": 32, "chunks": 4, "words": 1}[name]
    assert load.instructions == 128
    assert primer.access(primer.THREAD_LAYOUT, shared, 64, 2).ways == 1


@pytest.mark.parametrize("name", primer.SHARED_LAYOUTS)
def test_transposes(name):
    x, y = random(2, 64, 64), torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    constants = dict(N=64, LAYOUT=primer.THREAD_LAYOUT, SHARED=primer.SHARED_LAYOUTS[name])
    emulator.launch(transpose_rounds, (2,), x, y, 3, **constants, num_warps=4, schedule_seed=3)
    assert torch.equal(y, x.mT)
    sass = compiled(transpose_rounds, x, y, 3, **constants).families()
    assert sass["LDS"] % 32 == 0 and "LDSM" not in sass and "STSM" not in sass  # element by element, as counted
    assert sass["BAR"] >= 2  # nobody wrote a barrier


# --- The kernels


def test_rows_are_scaled_with_either_layout(kernels):
    x, w = random(32, 32, dtype=torch.float32), random(32, dtype=torch.float32)
    sizes = dict(ROWS=32, COLUMNS=32)
    loads = []
    for layout in (gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]), gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])):
        y = torch.zeros(32, 32)
        launch(kernels.scale_rows, x, w, y, **sizes, LAYOUT=layout)
        assert torch.equal(y, x * w[:, None])
        loads.append(compiled(kernels.scale_rows, x, w, y, **sizes, LAYOUT=layout).opcodes)
    assert loads[0]["LDG.E.128"] == 2 and loads[1]["LDG.E.128"] == 0 and loads[1]["LDG.E"] > loads[0]["LDG.E"]


@pytest.mark.parametrize("seed", SEEDS)
def test_one_tile(kernels, seed):
    x, source, y = tiles(1)
    launch(kernels.one_tile, source, y, LAYOUT=ROWS_OF_64, seed=seed)
    assert torch.equal(y, x)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forgotten_wait_is_caught_unless_the_copy_is_early(kernels, seed):
    x, source, y = tiles(1)
    run = partial(launch, kernels.one_tile, source, y, LAYOUT=ROWS_OF_64, WAIT=False, seed=seed)
    if seed == EARLY:
        run()
        assert torch.equal(y, x)
    else:
        with pytest.raises(UnwrittenRead, match=r"primer_cells.py:\d+\) reads 512 bytes"):
            run()


@pytest.mark.parametrize("seed", SEEDS)
def test_ring(kernels, seed):
    for stages, num_tiles in ((2, 1), (2, 4), (2, 5), (3, 5)):
        x, source, y = tiles(num_tiles)
        launch(kernels.ring, source, y, num_tiles, LAYOUT=ROWS_OF_64, STAGES=stages, seed=seed)
        assert torch.equal(y, x)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_phase_is_caught(kernels, seed):
    _, source, y = tiles(4)
    with pytest.raises(Deadlock if seed == EARLY else UnwrittenRead):
        launch(kernels.ring, source, y, 4, LAYOUT=ROWS_OF_64, STAGES=2, FLIP=1, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_specialized_ring(kernels, seed):
    for num_tiles in (1, 5):
        x, source, y = tiles(num_tiles)
        launch(kernels.specialized, source, y, num_tiles, LAYOUT=ROWS_OF_64, STAGES=2, seed=seed)
        assert torch.equal(y, x)


@pytest.fixture(scope="module")
def scores(kernels):
    """padded and swapped: what they compute under all schedules is checked, what they compile to is returned."""
    keys, q = random(64, 128), random(8, 128)
    k_desc, exact = TensorDescriptor.from_tensor(keys, [64, 128], SWIZZLED), q.double() @ keys.double().T
    result = {}
    for kernel, mma in ((kernels.padded_scores, MMA), (kernels.swapped_scores, MMA_8)):
        for seed in SEEDS:
            s = torch.zeros(8, 64)
            launch(kernel, q, k_desc, s, ROWS=8, LOAD=ROWS_OF_128, MMA=mma, seed=seed)
            torch.testing.assert_close(s.double(), exact, rtol=1e-5, atol=1e-4)
        result[kernel.__name__] = compiled(kernel, q, k_desc, s, ROWS=8, LOAD=ROWS_OF_128, MMA=mma)
    return result


def test_registers_and_shared_memory_follow_from_layouts(scores):
    padded, swapped = scores["padded_scores"], scores["swapped_scores"]
    tile = 2 * primer.shared_offsets(SWIZZLED, [64, 128]).size
    assert padded.shared_bytes == 2 * tile + 8
    assert padded.shared_bytes > swapped.shared_bytes > tile
    assert padded.registers > 32 and padded.registers - swapped.registers == 28
    assert padded.spill_store_bytes == swapped.spill_store_bytes == 0


def test_machine_code_of_the_products(scores):
    padded, swapped = scores["padded_scores"], scores["swapped_scores"]
    assert padded.opcodes["HGMMA.64x64x16.F32.BF16"] == swapped.opcodes["HGMMA.64x8x16.F32.BF16"] == 8
    order = primer.sass_order(padded)
    steps = ["SYNCS.EXCH", "UTMALDG", "STS", "FENCE.VIEW.ASYNC", "BAR"]
    at = -1
    for step in [*steps, "WARPGROUP.ARRIVE", "HGMMA", "WARPGROUP.DEPBAR", "STG"]:
        at = order.find(step, at + 1)
        assert at >= 0, f"{step} does not follow in {order}"
    table = {row[0]: row for row in primer.sass_table({"padded": padded, "swapped": swapped}).rows}
    assert table["HGMMA"][1:3] == ["8", "8"] and table["SYNCS.PHASECHK"][1] == "2" and table["STS"][1] == "8"
    assert "USETMAXREG" not in table and all(len(row) == 5 for row in table.values())


def test_who_puts_in_a_forgotten_fence(kernels):
    _, source, y = tiles(4)
    k_desc = TensorDescriptor.from_tensor(random(64, 128), [64, 128], SWIZZLED)
    product = (kernels.padded_scores, random(8, 128), k_desc, torch.zeros(8, 64))
    found = {}
    for fence in (True, False):
        within = compiled(*product, ROWS=8, LOAD=ROWS_OF_128, MMA=MMA, FENCE=fence)
        across = compiled(kernels.specialized, source, y, 4, LAYOUT=ROWS_OF_64, STAGES=2, FENCE=fence)
        found[fence] = [c.ptx.count("fence.proxy.async") for c in (within, across)]
        assert {"USETMAXREG", "UTMALDG", "SYNCS"} <= set(across.families()) and across.num_warps == 8
    assert found == {True: [1, 1], False: [1, 0]}


def test_conversion_goes_through_shared_memory(kernels):
    layouts = dict(A=gl.BlockedLayout([1], [32], [4], [0]), B=gl.BlockedLayout([2], [32], [4], [0]))
    with pytest.raises(kernels.CompilationError, match="Layout mismatch"):
        compiled(kernels.add_mixed, torch.zeros(128), **layouts, CONVERT=False)
    converted = compiled(kernels.add_mixed, torch.zeros(128), **layouts, CONVERT=True)
    assert converted.shared_bytes == 512 and {"STS", "BAR", "LDS"} <= set(converted.families())


# --- The trace


@pytest.mark.parametrize("seed", SEEDS)
def test_trace_of_the_ring(kernels, seed):
    x, source, y = tiles(4)
    with primer.watch_mbarriers(["full[0]", "full[1]"], {0: "warp 0"}) as trace:
        launch(kernels.ring, source, y, 4, LAYOUT=ROWS_OF_64, STAGES=2, seed=seed)
    assert torch.equal(y, x)
    for name in trace.names:
        events = [e for e in trace.events if e.barrier == name]
        assert sum(e.amount for e in events if e.what == "land") == 2 * 64 * 64 * 2
        assert [e.amount for e in events if e.what == "pass"] == [0, 1]  # parities of its two tiles
        assert [e.states[name][0] for e in events if e.what == "pass"] == [1, 2]  # each when that phase was over
        assert events[-1].states[name] == (2, 1, 0)
    assert len(trace.table().rows) == len(trace.events) and len(trace.table(0, 5).rows) == 5
    primer_figures.draw_trace(trace)


@pytest.mark.parametrize("seed", SEEDS)
def test_trace_of_the_handshake(kernels, seed):
    _, source, y = tiles(4)
    names = ["full[0]", "empty[0]", "full[1]", "empty[1]"]
    with primer.watch_mbarriers(names, {0: "consumer", 6: "producer"}) as trace:
        launch(kernels.specialized, source, y, 4, LAYOUT=ROWS_OF_64, STAGES=2, seed=seed)
    for stage in (0, 1):
        passed = [e for e in trace.events if e.barrier == f"empty[{stage}]" and e.what == "pass"]
        assert [(e.who, e.amount, e.states.get(e.barrier, (0,))[0]) for e in passed] == [
            ("producer", 1, 0),  # a fresh ring is empty
            ("producer", 0, 1),
        ]
        assert len([e for e in trace.events if e.barrier == f"empty[{stage}]" and e.what == "arrive"]) == 2


def test_watching_leaves_the_emulator_as_it_was(kernels):
    before = emulator.scheduler.Mbarrier.update
    with primer.watch_mbarriers(["full"], {}):
        pass
    assert emulator.scheduler.Mbarrier.update is before


# --- The exercise


def layout_in(notebook: str):
    (source,) = (s for s in cells(notebook) if "def load_layout(" in s)
    names = {"gl": gl}
    exec(source.partition("\n\n\nexercise(")[0], names)
    return names["load_layout"]


solution = layout_in("solutions/04a_gluon_primer.ipynb")


def always_eight_neighbors(rows, columns, itemsize, num_warps):
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [num_warps, 1], [1, 0])


def a_lane_per_row(rows, columns, itemsize, num_warps):
    return gl.BlockedLayout([1, 16 // itemsize], [32, 1], [num_warps, 1], [1, 0])


def all_lanes_in_one_row(rows, columns, itemsize, num_warps):
    return gl.BlockedLayout([1, 16 // itemsize], [1, 32], [num_warps, 1], [1, 0])


def columns_first(rows, columns, itemsize, num_warps):
    return gl.BlockedLayout([16 // itemsize, 1], [32, 1], [num_warps, 1], [0, 1])


def single_elements(rows, columns, itemsize, num_warps):
    return gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])


def warps_side_by_side(rows, columns, itemsize, num_warps):
    across = min(32, columns * itemsize // 16)
    return gl.BlockedLayout([1, 16 // itemsize], [32 // across, across], [1, num_warps], [1, 0])


def too_many_lanes(rows, columns, itemsize, num_warps):
    return gl.BlockedLayout([1, 16 // itemsize], [8, 8], [num_warps, 1], [1, 0])


def four_warps(rows, columns, itemsize, num_warps):
    across = min(32, columns * itemsize // 16)
    return gl.BlockedLayout([1, 16 // itemsize], [32 // across, across], [4, 1], [1, 0])


MUTANTS = [
    a_lane_per_row, all_lanes_in_one_row, always_eight_neighbors, columns_first, four_warps, single_elements,
    too_many_lanes, warps_side_by_side, lambda rows, columns, itemsize, num_warps: "blocked",
]  # fmt: skip


def test_the_stub_is_not_attempted():
    assert exercise(primer.check_load_layout, layout_in("04a_gluon_primer.ipynb")).status == "not attempted"


@pytest.mark.parametrize("seed", range(3))
def test_the_solution_passes(seed):
    primer.check_load_layout(solution, seed=seed)
    assert exercise(primer.check_load_layout, solution).passed


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_wrong_layouts_fail_with_a_reason(mutant):
    result = exercise(primer.check_load_layout, mutant)
    assert result.status == "failed" and "must" in result.message


def test_the_solution_loads_16_bytes_at_a_time(kernels):
    x, w, y = random(32, 128, dtype=torch.float32), torch.ones(32), torch.zeros(32, 128)
    layout = solution(32, 128, 4, 4)
    sass = compiled(kernels.scale_rows, x, w, y, ROWS=32, COLUMNS=128, LAYOUT=layout).opcodes
    assert sass["LDG.E.128"] == sass["STG.E.128"] == 32 * 128 // (4 * 128)


# --- Measurements and pictures


def test_record_and_recorded(tmp_path, monkeypatch):
    def launched(kernel, grid, x, y, rounds, **constants):
        assert (kernel, grid, rounds % 2) == (transpose_rounds, (2,), 1)
        y.copy_(x.mT)

    path = tmp_path / "lessons.csv"
    assert primer.recorded(path) == {}
    frame = primer.record(path, commit="abc", device="cpu", launch=launched, tiles=2, replays=2)
    assert set(frame.commit) == {"abc"} and len(frame) == 3
    assert primer.recorded(path).keys() == primer.SHARED_LAYOUTS.keys()
    primer.record(path, device="cpu", launch=launched, tiles=2, replays=1)
    newest = primer.recorded(path)
    assert len(newest) == 3 and all(t > 0 for t in newest.values())


def test_wrong_transposes_are_not_timed():
    with pytest.raises(AssertionError, match="'plain' gives wrong values"):
        primer.measure_transposes(device="cpu", launch=lambda *args, **constants: None, tiles=1)


def test_pictures():
    primer_figures.draw_ring(6, 2)
    primer_figures.draw_padding([("padded", MMA, [64, 64], 0), ("swapped", MMA_8, [64, 8], 1)])
    figure = primer_figures.draw_swizzle([("a", gl.NVMMASharedLayout(0, 16, 2)), ("b", SWIZZLED)], [64, 64], 2)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a: 8 accesses", "b: 1 access"]
