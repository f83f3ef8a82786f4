import numpy as np
import pytest
import torch
from cpu.emulator_kernels import (
    count_arrivals,
    cp_async_copy,
    cp_async_mbarrier,
    exchange,
    fp8_transposed,
    product,
    ring_copy,
    small_product,
    specialized,
    tma_round_trip,
    unwritten_read,
)
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hpcattn import emulator
from hpcattn.emulator import BarrierMisuse, Deadlock, EmulatorError, OutOfBounds, UnsupportedInstruction, UnwrittenRead
from hpcattn.inspection import Variant

SEEDS = range(8)  # twice each kind of schedule
HOSTILE = [1, 3, 5, 7]  # under the others, a copy that nobody waits for may land in time
BF16_TILE, FP32_TILE = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 32, 2)


def describe(tensor, block, layout=BF16_TILE, **options):
    return TensorDescriptor.from_tensor(tensor, block, layout, **options)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def copy_ring(num_tiles=5, stages=3, bug="", seed=0):
    x, y = random(num_tiles * 64, 64), torch.zeros(num_tiles * 64, 64, dtype=torch.bfloat16)
    source = describe(x, [64, 64])
    emulator.launch(ring_copy, (1,), source, y, num_tiles, STAGES=stages, BUG=bug, num_warps=4, schedule_seed=seed)
    return torch.equal(x, y)


@pytest.mark.parametrize("seed", SEEDS)
def test_tma_ring(seed):
    assert copy_ring(seed=seed)
    assert copy_ring(num_tiles=2, seed=seed)  # shorter than the ring


@pytest.mark.parametrize("seed", HOSTILE)
def test_dropped_wait_reads_what_has_not_landed(seed):
    where = r"warp \d of CTA \(0, 0, 0\) at `ldmatrix.*\(PTX line \d+, emulator_kernels.py:\d+\)"
    with pytest.raises(UnwrittenRead, match=where + r" reads \d+ bytes of shared memory that nothing wrote"):
        copy_ring(bug="no wait", seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_wrong_phase(seed):
    with pytest.raises((UnwrittenRead, Deadlock)):  # the first wait passes at once
        copy_ring(bug="wrong phase", seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_too_few_bytes_expected(seed):
    with pytest.raises((UnwrittenRead, Deadlock, BarrierMisuse)):
        copy_ring(bug="few bytes", seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_too_many_bytes_expected_deadlock(seed):
    lacks = r"phase parity 0 of mbarrier #0 \(shared \+\d+ of CTA 0, initialized at emulator_kernels.py:\d+\): "
    lacks += r"0 phases completed; phase 0 \(parity 0\) lacks 0 of 1 arrivals and 8192 bytes; in `mbarrier.try_wait"
    with pytest.raises(Deadlock, match=lacks):
        copy_ring(bug="many bytes", seed=seed)


def specialize(bug="", seed=0, num_tiles=5, stages=2):
    x, y = random(num_tiles * 64, 64, dtype=torch.float32), torch.zeros(num_tiles * 64, 64)
    source = describe(x, [64, 64], FP32_TILE)
    emulator.launch(specialized, (1,), source, y, num_tiles, STAGES=stages, BUG=bug, num_warps=4, schedule_seed=seed)
    return torch.equal(x + 1, y)


@pytest.mark.parametrize("seed", SEEDS)
def test_warp_specialization(seed):
    assert specialize(seed=seed)
    assert specialize(seed=seed, num_tiles=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_arrive_deadlocks(seed):
    with pytest.raises(Deadlock) as caught:
        specialize("no arrive", seed)
    report = str(caught.value)
    assert "warp 6 of CTA (0, 0, 0) waits for phase parity 0 of mbarrier #1" in report  # the producer, for empty[0]
    assert "warps 0, 1, 2, 3 of CTA (0, 0, 0) wait for phase parity 1 of mbarrier #0" in report  # full[0]
    assert report.count("lacks 1 of 1 arrivals and 0 bytes") == 2
    assert "wait for named barrier 1, phase 2: 96 of 256 threads have arrived" in report  # warps without a job


@pytest.mark.parametrize("seed", SEEDS)
def test_producer_starting_in_the_wrong_phase_deadlocks(seed):
    with pytest.raises(Deadlock, match=r"warp 6 .* waits for phase parity 0 of mbarrier #1 "):
        specialize("producer phase", seed)


@pytest.mark.parametrize("bug", ["no wait for empty", "early arrive"])
def test_stage_overwritten_too_early_is_seen_under_some_schedule(bug):
    def caught(seed):
        try:
            return not specialize(bug, seed)
        except EmulatorError:
            return True

    assert any(map(caught, SEEDS))


@pytest.mark.parametrize("padding, fill", [("zero", 0.0), ("nan", float("nan"))])
def test_out_of_range_box_is_filled_and_clipped(padding, fill):
    x, y = random(40, 64), torch.full((70, 64), 7.0, dtype=torch.bfloat16)
    target = TensorDescriptor(y, [50, 64], [64, 1], [64, 64], BF16_TILE)
    emulator.launch(tma_round_trip, (1,), describe(x, [64, 64], padding=padding), target, num_warps=4)
    expected = torch.full_like(y, 7.0)
    expected[:40], expected[40:50] = x, fill
    assert torch.equal(y.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def multiply(a_transposed, b_transposed, seed, kernel=None):
    a, b = random(64, 128), random(128, 64)
    c = torch.zeros(64, 64)
    a_laid, b_laid = (m.T.contiguous() if t else m for m, t in ((a, a_transposed), (b, b_transposed)))
    args = [describe(a_laid, list(a_laid.shape)), describe(b_laid, list(b_laid.shape)), c]
    constants = dict(N=64, A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed)
    if kernel is None:
        emulator.launch(product, (1,), *args, **constants, num_warps=4, schedule_seed=seed)
    else:
        ptx = kernel(Variant.from_launch("product", product, *args, **constants, num_warps=4).compile().ptx)
        emulator.run(ptx, (1,), args, schedule_seed=seed)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_wgmma(a_transposed, b_transposed):
    for seed in range(4):
        multiply(a_transposed, b_transposed, seed)


def test_wgmma_without_its_wait():
    wait = "wgmma.wait_group.sync.aligned"

    def weaken(ptx):
        assert ptx.count(wait) == 1
        head, _, tail = ptx.partition(wait)
        return head + wait + tail.replace("0", "1", 1)

    with pytest.raises(EmulatorError, match="st.global.* reads register .*, which nothing wrote"):
        multiply(False, False, 0, weaken)


def swap(bug="", seed=0):
    x, y = random(4, 128, dtype=torch.float32), torch.zeros(4, 128)
    emulator.launch(exchange, (2,), x, y, BUG=bug, num_warps=4, num_ctas=2, schedule_seed=seed)
    return torch.equal(y, x[[1, 0, 3, 2]])


@pytest.mark.parametrize("seed", SEEDS)
def test_cluster_exchange(seed):
    assert swap(seed=seed)


def test_missing_cluster_barrier_is_seen_under_some_schedule():
    def caught(seed):
        try:
            return not swap("no barrier", seed)
        except UnwrittenRead:
            return True

    assert any(map(caught, SEEDS))


@pytest.mark.parametrize("right", [True, False])
def test_fp8_transposed_through_registers(right):
    even, odd = ("0x6240", "0x7351") if right else ("0x6420", "0x7531")
    asm = f"prmt.b32 $0, $2, $3, {even};\nprmt.b32 $1, $2, $3, {odd};"
    v, p, o = random(64, 128).to(torch.float8_e4m3fn), random(8, 64, dtype=torch.float32), torch.zeros(8, 128)
    source = describe(v, [64, 128], gl.NVMMASharedLayout(128, 8, 2))
    emulator.launch(fp8_transposed, (1,), source, p, o, TOKENS=64, SELECTORS=asm, num_warps=4, schedule_seed=1)
    expected = p.to(torch.float8_e4m3fn).double() @ v.double()
    assert torch.allclose(o.double(), expected, rtol=1e-5, atol=1e-4) == right


@pytest.mark.parametrize("seed", HOSTILE)
def test_cp_async(seed):
    x, y = random(64, 64), torch.ones(64, 64, dtype=torch.bfloat16)
    emulator.launch(cp_async_copy, (1,), x, y, BUG="", num_warps=4, schedule_seed=seed)
    assert torch.equal(y[:48], x[:48]) and not y[48:].any()
    with pytest.raises(UnwrittenRead):
        emulator.launch(cp_async_copy, (1,), x, y, BUG="no wait", num_warps=4, schedule_seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_cp_async_arrives_at_an_mbarrier(seed):
    x, y = random(64, 64), torch.ones(64, 64, dtype=torch.bfloat16)
    emulator.launch(cp_async_mbarrier, (1,), x, y, num_warps=4, schedule_seed=seed)
    assert torch.equal(y, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mma(dtype):
    a, b, c = random(16, 32, dtype=dtype), random(32, 16, dtype=dtype), torch.zeros(16, 16)
    emulator.launch(small_product, (1,), a, b, c, num_warps=1)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_unwritten_shared_memory_is_reported():
    y = torch.zeros(64, 64, dtype=torch.bfloat16)
    with pytest.raises(UnwrittenRead, match=r"ld\.shared.* reads \d+ bytes of shared memory that nothing wrote"):
        emulator.launch(unwritten_read, (1,), y, num_warps=4)
    result = emulator.launch(unwritten_read, (1,), y, num_warps=4, unwritten_reads="list")
    assert result.unwritten_reads and y.isnan().all()  # shared memory starts as NaN
    assert {r.space for r in result.unwritten_reads} == {"shared"}


def test_global_memory_is_checked():
    x, y = random(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16)
    with pytest.raises(UnwrittenRead, match="global"):
        emulator.launch(cp_async_copy, (1,), x, y, BUG="", num_warps=4, unwritten=[x])
    with pytest.raises(OutOfBounds, match="outside every buffer"):
        emulator.launch(cp_async_copy, (1,), x, y[:63].clone(), BUG="", num_warps=4)


def test_atomics_across_programs():
    counter, order = torch.zeros(1, dtype=torch.int32), np.full(6, -1, np.int32)
    emulator.launch(count_arrivals, (6,), counter, torch.from_numpy(order), num_warps=4, schedule_seed=5)
    assert counter.item() == 6 and sorted(order) == list(range(6)) and list(order) != list(range(6))


HEAD = ".visible .entry probe(\n\t.param .u64 .ptr .global .align 1 probe_param_0\n)\n.reqntid 32\n{\n"


def probe(code, **options):
    """What `code` leaves in %r1 of each lane; the lane is in %r0."""
    out = np.zeros(32, np.uint32)
    load = "ld.param.b64 %rd1, [probe_param_0];\nmov.u32 %r0, %laneid;\nmad.wide.u32 %rd2, %r0, 4, %rd1;\n"
    emulator.run(f"{HEAD}{load}{code}\nst.global.b32 [%rd2], %r1;\nret;\n}}\n", (1,), [out], **options)
    return out


LANE = np.arange(32)
INSTRUCTIONS = {
    "prmt.b32 %r1, 0x33221100, 0x77665544, 0x6240;": 0x66224400,
    "prmt.b32 %r1, 0x00800000, 0, 0x000a;": 0x000000FF,  # the sign of byte 2
    "bfe.u32 %r1, 0x00000f50, 4, 8;": 0xF5,
    "bfe.s32 %r1, 0x00000f50, 4, 8;": 0xFFFFFFF5,
    "shf.l.wrap.b32 %r1, 0x80000000, 1, 1;": 3,
    "shr.s32 %r1, -8, 40;": 0xFFFFFFFF,
    "shl.b32 %r1, 1, 32;": 0,
    "div.s32 %r1, -7, 2;": 0xFFFFFFFD,
    "rem.s32 %r1, -7, 2;": 0xFFFFFFFF,
    "mul.hi.u32 %r1, 0x80000000, 6;": 3,
    "mov.b32 %r2, -3;\nmul.wide.s32 %rd3, %r2, 5;\nshr.s64 %rd4, %rd3, 1;\ncvt.u32.u64 %r1, %rd4;": 0xFFFFFFF8,
    "mov.b64 %rd3, {1, 2};\nmov.b64 {%r2, %r3}, %rd3;\nadd.s32 %r1, %r2, %r3;": 3,
    "cvt.rn.bf16x2.f32 %r1, 0f3F808000, 0f3F818000;": 0x3F803F82,  # ties to even: 1 and 1.015625
    "cvt.rn.f32.s32 %r1, -2;": 0xC0000000,
    "cvt.rzi.s32.f32 %r1, 0fC0200000;": 0xFFFFFFFE,
    "fma.rn.f32 %r1, 0f40000000, 0f40400000, 0f3F800000;": 0x40E00000,
    "max.f32 %r1, 0f7FC00000, 0f3F800000;": 0x3F800000,
    "max.NaN.f32 %r1, 0f7FC00000, 0f3F800000;": 0x7FC00000,
    "setp.neu.f32 %p1, 0f7FC00000, 0f3F800000;\nselp.b32 %r1, 1, 2, %p1;": 1,
    "setp.lt.s32 %p1, -1, 0;\nsetp.lt.and.u32 %p2, 0, 1, %p1;\nselp.b32 %r1, 1, 2, !%p2;": 2,
    "setp.lt.u32 %p1, %r0, 5;\nvote.sync.ballot.b32 %r1, %p1, 0xffffffff;": 31,
    "redux.sync.add.s32 %r1, %r0, 0xffffffff;": 496,
    "shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;": LANE ^ 1,
    "shfl.sync.up.b32 %r1, %r0, 2, 0, -1;": np.where(LANE < 2, LANE, LANE - 2),
    "shfl.sync.down.b32 %r1, %r0, 4, 0x181f, -1;": np.where(LANE % 8 < 4, LANE + 4, LANE),  # within eight lanes
    "mov.b32 %r1, 9;\nsetp.lt.u32 %p1, %r0, 5;\n@!%p1 add.u32 %r1, %r0, 1;": np.where(LANE < 5, 9, LANE + 1),
    "elect.sync %r2|%p1, -1;\nselp.b32 %r1, 1, 0, %p1;": LANE == 0,
    "{\n.reg .b32 t;\nmov.b32 t, 2;\nbra.uni over;\nmov.b32 t, 3;\nover:\nmov.b32 %r1, t;\n}": 2,
}


@pytest.mark.parametrize("code", INSTRUCTIONS)
def test_instruction(code):
    np.testing.assert_array_equal(probe(code), np.broadcast_to(INSTRUCTIONS[code], 32))


def test_what_cannot_be_run_says_so():
    with pytest.raises(UnsupportedInstruction, match=r"`vadd.s32 %r1, %r2, %r3` \(PTX line 9\)"):
        probe("vadd.s32 %r1, %r2, %r3;")
    with pytest.raises(UnsupportedInstruction, match="multicast::cluster"):
        probe("cp.async.bulk.tensor.2d.shared::cluster.global.multicast::cluster [%r1], [%rd1, {%r2, %r3}], [%r4];")
    with pytest.raises(EmulatorError, match="reads register %r7, which nothing wrote"):
        probe("mov.b32 %r1, %r7;")
    with pytest.raises(EmulatorError, match="equal in all lanes"):
        probe("setp.lt.u32 %p1, %r0, 5;\n@%p1 bra over;\nover:\nmov.b32 %r1, 0;")
    with pytest.raises(BarrierMisuse, match="no mbarrier is initialized"):
        probe("mov.b32 %r1, 1024;\nmbarrier.arrive.shared::cta.b64 _, [%r1];")
    with pytest.raises(BarrierMisuse, match="more than its 2 arrivals"):
        probe(
            "mov.b32 %r1, 1024;\nmbarrier.init.shared::cta.b64 [%r1], 2;\nmbarrier.arrive.shared::cta.b64 _, [%r1], 3;"
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_store_async_to_the_peer(seed):
    code = """setp.eq.u32 %p1, %r0, 0;
        mov.b32 %r2, global_smem;
        @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
        barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;
        mov.u32 %r3, %cluster_ctarank;
        xor.b32 %r4, %r3, 1;
        mapa.shared::cluster.u32 %r5, %r2, %r4;
        mad.lo.u32 %r6, %r0, 4, %r5;
        add.u32 %r7, %r3, 7;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r6 + 128], %r7, [%r5];
        waitLoop:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
        @!%p2 bra.uni waitLoop;
        ld.shared.b32 %r1, [%r2 + 128];
        and.b32 %r8, %r0, 15;
        mad.wide.u32 %rd2, %r3, 64, %rd1;
        mad.wide.u32 %rd2, %r8, 4, %rd2;"""
    np.testing.assert_array_equal(probe(code, cluster=2, schedule_seed=seed), np.repeat([8, 7], 16))


def test_shared_memory_of_an_exited_cta():
    code = """mov.b32 %r1, global_smem;
        st.shared.b32 [%r1], %r1;
        mov.u32 %r2, %cluster_ctarank;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra over;
        mapa.shared::cluster.u32 %r3, %r1, 0;
        ld.shared::cluster.b32 %r1, [%r3];
        over:"""
    errors = []
    for seed in SEEDS:
        try:
            probe(code, cluster=2, schedule_seed=seed)
        except EmulatorError as error:
            errors.append(type(error))
    assert OutOfBounds in errors


def test_an_address_without_its_rank():
    """An inline-assembly operand has the rank masked off: in the first CTA that goes unnoticed."""
    code = """mov.b32 %r2, global_smem;
        and.b32 %r2, %r2, 16777215;
        st.shared.b32 [%r2], %r0;
        ld.shared.b32 %r1, [%r2];"""
    probe(code)
    with pytest.raises(OutOfBounds, match="memory of CTA 0 .* masked off"):
        probe(code, cluster=2)


def test_arguments_that_do_not_fit():
    y = torch.zeros(64, 64, dtype=torch.bfloat16)
    ptx = Variant.from_launch("unwritten_read", unwritten_read, y, num_warps=4).compile().ptx
    with pytest.raises(ValueError, match="parameters"):
        emulator.run(ptx, (1,), [y, y, y, y])
    with pytest.raises(ValueError, match="parameters"):
        emulator.run(ptx, (1,), [describe(y, [64, 64])])
    with pytest.raises(TypeError, match="cannot pass a str"):
        emulator.run(ptx, (1,), ["y"])
    with pytest.raises(ValueError, match="grid"):
        emulator.run(ptx, (0,), [y])
