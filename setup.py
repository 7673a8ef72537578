"""Maps the top-level folders to one import name: ``kernels/`` is ``portable_ops.kernels`` and so on.

A top-level package called ``kernels`` would shadow the Hugging Face package of that name, which
transformers imports; so the folders keep their short names on disk only.
"""

from setuptools import setup

FOLDERS = ("kernels", "patterns", "inductor_ext")

setup(
    packages=[f"portable_ops.{name}" for name in FOLDERS],
    package_dir={f"portable_ops.{name}": name for name in FOLDERS},
    package_data={"portable_ops.inductor_ext": ["gate_tables/*.json", "templates/*"]},
)
