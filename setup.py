"""The packages: those in `modeling_gqa/`, and the folders that `package_dir` in setup.cfg installs as parts of it."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["modeling_gqa*"]), "modeling_gqa.scripts", "modeling_gqa.configuration"])
