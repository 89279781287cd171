"""The version, which FAKE_NPU_VERSION sets: in torch_npu.__version__ and in what importlib.metadata reports."""
import importlib.metadata
import os
import sys

__version__ = os.environ.get("FAKE_NPU_VERSION") or "2.13.0"
if "+fake" not in __version__:
    __version__ += "+fake"


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename):
        return f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {__version__}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path


class _Finder:
    """Answers before the dist-info folder does, and only to a question about this package."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None

    @staticmethod
    def find_distributions(context):
        return [_Distribution()] if (context.name or "").replace("-", "_") == "torch_npu" else []


def announce():
    if os.environ.get("FAKE_NPU_VERSION"):
        sys.meta_path.insert(0, _Finder)
