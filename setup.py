"""The packages of panjue: the four folders and all that is in them."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("prompts", "finetune", "serve", "eval")
within = [pattern for name in FOLDERS for pattern in (name, f"{name}.*")]
found = find_namespace_packages(include=within, exclude=["*__pycache__*"])
setup(packages=[f"panjue.{name}" for name in found])
