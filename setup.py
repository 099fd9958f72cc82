"""The packages: those in `modeling_gqa/`, and the folders that `package_dir` in setup.cfg installs as parts of it."""

from setuptools import find_packages, setup

training = [f"modeling_gqa.training.{name}" for name in find_packages("training")]
setup(
    packages=[
        *find_packages(include=["modeling_gqa*"]),
        "modeling_gqa.training",
        *training,
        "modeling_gqa.configuration",
    ]
)
