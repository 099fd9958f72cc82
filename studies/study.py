"""Which models a study trains, for how long, and with which losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modeling_gqa import GQAConfig
from modeling_gqa.common.atomic import read_object
from modeling_gqa.conversion import target_config
from modeling_gqa.training.comparison.runs import Run, is_finite
from modeling_gqa.training.results import RESULTS
from modeling_gqa_cli.errors import UserError

from .recipe import StudyRecipe

PAPERS = "mean"  # the GQA paper's method, by which the studies of uptraining and of groups convert


@dataclass(frozen=True)
class Student:
    """A conversion of the source to `heads` key/value heads; the method is "" where the source has as many."""

    heads: int
    method: str

    @property
    def name(self) -> str:
        return f"{self.heads}-heads-{self.method}" if self.method else "source"


@dataclass(frozen=True)
class Point:
    """A student after a share of the source's pretraining tokens."""

    student: Student
    share: float

    def run_name(self, seed: int) -> str:
        return f"{self.student.name}-share{self.share:g}-seed{seed}"


@dataclass(frozen=True)
class Study:
    """One of the three studies; configuration and pretraining tokens are the source's."""

    name: str
    recipe: StudyRecipe
    config: GQAConfig
    pretraining_tokens: int

    @property
    def folder(self) -> Path:
        return Path(str(self.recipe.output_dir)).resolve()  # runs compare what they are told when they go on

    @property
    def most_heads(self) -> int:
        return self.config.num_key_value_heads

    @property
    def heads(self) -> int:
        """Key/value heads of GQA: those asked for, a quarter of the source's, a half, or one, where it has only two."""
        share = 4 if self.most_heads % 4 == 0 and self.most_heads > 4 else 2
        return self.recipe.heads or max(
            heads for heads in self.all_heads() if heads <= max(1, self.most_heads // share)
        )

    def all_heads(self) -> list[int]:
        """Return the numbers of key/value heads that divide the source's."""
        return [heads for heads in range(1, self.most_heads + 1) if self.most_heads % heads == 0]

    def label(self, heads: int) -> str:
        return "MHA" if heads == self.config.num_attention_heads else "MQA" if heads == 1 else f"GQA-{heads}"

    def config_with(self, heads: int) -> GQAConfig:
        """Return the source's configuration with this number of key/value heads."""
        if heads == self.most_heads:
            return self.config
        if heads == 1:
            return target_config(self.config, "mqa")
        return target_config(self.config, "gqa", num_key_value_heads=heads)

    def student(self, heads: int) -> Student:
        """Return the source with `heads` key/value heads, converted as the paper does."""
        return Student(heads, PAPERS if heads < self.most_heads else "")

    def points(self) -> list[Point]:
        """Return what is trained."""
        if self.name == "conversion":
            return [Point(Student(1, method), self.recipe.share) for method in self.recipe.methods]
        if self.name == "uptraining":
            students = [self.student(heads) for heads in self.compared_heads()]
            return [Point(student, share) for student in students for share in self.recipe.shares]
        return [Point(self.student(heads), self.recipe.share) for heads in self.all_heads()]

    def compared_heads(self) -> list[int]:
        """Return the source's number of heads, GQA's and MQA's, each once."""
        return list(dict.fromkeys((self.most_heads, self.heads, 1)))

    def seeds(self) -> range:
        return range(self.recipe.seed, self.recipe.seed + self.recipe.seeds)

    def students_by_seed(self) -> list[tuple[Student, int]]:
        """Return the students to convert; those that draw at random, with each seed."""
        wanted = {point.student for point in self.points()} | {self.student(self.most_heads)}
        return [
            (student, seed)
            for student in sorted(wanted, key=lambda student: (student.method != "", student.name))  # the source first
            for seed in (self.seeds() if student.method == "random" else self.seeds()[:1])
        ]

    def student_folder(self, student: Student, seed: int) -> Path:
        name = f"{student.name}-seed{seed}" if student.method == "random" else student.name
        return self.folder / "students" / name

    def needed(self, ended: Mapping[str, float]) -> list[Run]:
        """Return the runs that have not ended."""
        pairs = [(point, seed) for seed in self.seeds() for point in self.points()]
        return [self.run(point, seed) for point, seed in pairs if point.run_name(seed) not in ended]

    def run(self, point: Point, seed: int) -> Run:
        options = {
            **self.recipe.options_of_runs(),
            "student": str(self.student_folder(point.student, seed)),
            "pretraining_fraction": point.share,
            "pretraining_tokens": self.pretraining_tokens,
            "seed": seed,
            "data_seed": seed,
        }
        return Run(point.run_name(seed), "uptrain", self.recipe.uptraining, options, size=point.share)

    def losses(self, point: Point, field: str = "validation_loss") -> list[float]:
        """Return a loss of results.json over seeds, of the runs that did not fail."""
        paths = [self.folder / "runs" / point.run_name(seed) / RESULTS for seed in self.seeds()]
        return [loss for path in paths if is_finite(loss := (read_object(path) or {}).get(field))]

    def curve(self, heads: int) -> dict[float, list[float]]:
        """Return losses by share, 0 included, of the model with these heads."""
        points = [point for point in self.points() if point.student == self.student(heads)]
        # All of them begin alike, and the first may have failed.
        known = (self.losses(point, "initial_validation_loss") for point in points)
        curve = {0.0: next(filter(None, known), [])} | {point.share: self.losses(point) for point in points}
        return {share: losses for share, losses in curve.items() if losses}


def check_source(config: GQAConfig, recipe: StudyRecipe) -> None:
    """Raise `UserError` for a source that has no key/value heads to merge."""
    layers = {(layer.attention_kind, layer.num_key_value_heads) for layer in config.per_layer_config}
    if len(layers) > 1 or config.attention_kind == "mla" or config.num_key_value_heads == 1:
        raise UserError(f"{recipe.source} has no key/value heads to merge that are alike in all layers")
    if recipe.heads and (recipe.heads >= config.num_key_value_heads or config.num_key_value_heads % recipe.heads):
        raise UserError(
            f"heads is {recipe.heads}; it must divide the source's {config.num_key_value_heads} and be fewer"
        )
    tokens, positions = recipe.prompt_tokens + recipe.new_tokens, config.max_position_embeddings
    if tokens > positions:
        raise UserError(f"prompt_tokens and new_tokens are {tokens} together, more than the {positions} positions")
