"""Pictures: one colour for each attention kind everywhere, and lines that are named where they end."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_gqa_cli.errors import UserError, install_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008, jfly.uni-koeln.de/color).
COLORS = {"mha": "#D55E00", "gqa": "#E69F00", "mqa": "#009E73", "mla": "#0072B2", "mixed": "#CC79A7"}
FORMATS = (".png", ".svg", ".pdf")
STYLES = ("-", "--", ":", "-.")  # of models of the same kind
LONGEST_NAME = 40  # characters, of a line


def new_figure(**options: Any) -> "Figure":
    """Return a matplotlib figure; raises `UserError` where that is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"a picture needs matplotlib: {install_extra('plots')}") from None
    return Figure(layout="constrained", **options)


def check_picture(path: Path) -> None:
    """Raise `UserError` for a name that ends in no format of pictures, or where matplotlib is not installed."""
    new_figure()
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} names no picture: let it end in {', '.join(FORMATS)}")
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a picture in it")


def save(figure: "Figure", path: Path) -> None:
    """Write a picture in the format that the name ends in."""
    kind = path.suffix.lower()
    drawn = BytesIO()  # what a full disk refuses is then one write
    figure.savefig(drawn, format=kind[1:], dpi=130, metadata={"Software": None} if kind == ".png" else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(drawn.getvalue())


def line_styles(kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return how the line of a model of each kind is drawn: its colour, and a stroke of its own among that kind."""
    seen: dict[str, int] = {}
    found = []
    for kind in kinds:
        number = seen[kind] = seen.get(kind, -1) + 1
        found.append({"color": COLORS.get(kind, "black"), "linestyle": STYLES[number % len(STYLES)]})
    return found


def tidy(axis: Any) -> None:
    """Leave of an axis what is read: no minor ticks, a faint grid, two of its four edges."""
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def name_lines(axis: Any, ends: Sequence[tuple[float, float, str, str]], least: float = 0.08) -> None:
    """Write names at the right ends of lines, moved apart where they would cover each other.

    Args:
        axis: with its final scales and limits.
        ends: x, y, name and colour of each.
        least: distance between two names, as a share of the axis's height.
    """
    if not ends:
        return
    axis.get_ylim()  # brings the limits up to date
    ends = sorted(ends, key=lambda end: end[1])
    heights = [axis.transAxes.inverted().transform(axis.transData.transform(end[:2]))[1] for end in ends]
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + least) if placed else height)
    lift = sum(placed) / len(placed) - sum(heights) / len(heights)
    for (*_, name, color), height in zip(ends, placed, strict=True):
        where: dict[str, Any] = {"xy": (1.02, height - lift), "xycoords": "axes fraction", "va": "center"}
        short = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        axis.annotate(short, **where, color=color, fontsize=8, annotation_clip=False, parse_math=False)
