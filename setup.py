"""All that is to be said of the package is in pyproject.toml; here only that each build begins with an empty folder.

setuptools packs whatever it finds in ./build/lib, also modules that are long deleted: an earlier build left them there.
"""

from tempfile import TemporaryDirectory

from setuptools import setup

with TemporaryDirectory(prefix="healthd-build-") as folder:
    setup(options={"build": {"build_base": folder}})
