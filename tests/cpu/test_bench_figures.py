import matplotlib.colors as colors
import pandas as pd
import pytest

from hpcattn.bench import figures, style, suites
from hpcattn.bench.ceilings import Ceilings
from hpcattn.bench.records import DATA, latest, load


@pytest.fixture(scope="module")
def measuring(tmp_path_factory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("study")
    suites.main(["--suite", "measuring", "--small", "--device", "cpu", "--out", str(out)])
    return load(out / "measuring.csv", table="measuring")


def has_data(figure) -> bool:
    return all(ax.lines or ax.collections or ax.patches for ax in figure.axes)


def test_every_recorded_figure_is_drawn(tmp_path, capsys):
    assert figures.main(["--out", str(tmp_path)]) == 0
    files = {path.stem for path in tmp_path.glob("*.png")}
    assert files >= {
        "protocol_scatter",
        "cycle_budget",
        "decode_times",
        "prefill_rates",
        "roofline",
        "published_speedups",
    }
    assert str(tmp_path / "roofline.png") in capsys.readouterr().out


def test_figures_hold_data_and_labels():
    for name, figure in figures.draw_all().items():
        assert has_data(figure), name
        assert figure.get_figwidth() == style.WIDTH
        assert any(ax.get_xlabel() or ax.get_ylabel() for ax in figure.axes), name


@pytest.mark.parametrize(
    "draw", [figures.calls_per_graph, figures.working_set, figures.wrapper_overhead, figures.sample_spread]
)
def test_study_figures(draw, measuring):
    assert has_data(draw(measuring))
    with pytest.raises(ValueError, match="run the suite `measuring`"):
        draw(measuring.iloc[:0])


def test_protocol_scatter_shows_pairs_and_the_study(measuring):
    rows = pd.concat([figures.recorded("decode"), figures.recorded("prefill")])
    without = figures.protocol_scatter(rows).axes[0]
    points = sum(len(c.get_offsets()) for c in without.collections)
    assert points > 150
    assert len(figures.protocol_scatter(rows, measuring).axes[0].collections) == len(without.collections) + 4


def test_decode_bars_are_the_records():
    frame = figures.recorded("decode")
    figure = figures.decode_times(frame, Ceilings(4.27, 679, 1312))
    heights = sorted(p.get_height() for p in figure.axes[0].patches if p.get_height() > 0)  # NaN: not measured
    rows = latest(frame).query("protocol == 'steady' and dtype == 'bf16' and num_query_tokens == 1")
    rows = rows[(rows.layout == "NHD") & (rows.page_size == 64)]
    assert len(rows) >= 27 and heights == pytest.approx(sorted(rows.median_us))


def test_cycle_budget_matches_its_hand_calculation():
    clocks = figures.tile_clocks(64, "bf16", Ceilings(4.3, 679, 1312))
    assert round(clocks["DRAM"]) == 1992 and clocks["tensor cores"] == 512
    swapped = figures.tile_clocks(8, "bf16", Ceilings(4.3, 679, 1312))
    assert swapped["tensor cores"] == 64 and swapped["exponential"] == 32


def test_ours_appears_beside_the_published_geomeans():
    published = load(DATA / "published" / "triton_tle_article.csv", table="published")
    frame = figures.recorded("decode")
    peer = frame[(frame.run_id == "hpc-ops-single-2026-11-30") & (frame.schedule == "dynamic")]
    ours = peer.assign(implementation="hopper", median_us=peer.median_us / 1.25)
    figure = figures.published_speedups(published, pd.concat([peer, ours]))
    labels = [c.get_label() for c in figure.axes[0].collections]
    shown = [
        c.get_offsets()[0][1]
        for c, label in zip(figure.axes[0].collections, labels, strict=True)
        if label == "ours, recorded"
    ]
    assert shown == pytest.approx([1.25] * 6)


def test_colors_are_distinct_where_they_meet():
    together = ["hopper", "portable", "hpc_ops", "hpc_ops/static", "flash_attn_3", "flashinfer", "torch_sdpa_cudnn"]
    assert len({colors.to_hex(style.COLORS[name]) for name in together}) == len(together)
    assert set(style.LABELS) <= set(style.COLORS)
