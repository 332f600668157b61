"""``python -m hbnode`` prints the versions and devices that a bug report needs."""

import importlib.metadata
import importlib.util
import platform
import sys

import torch

import hbnode

EXTRAS = {  # each optional extra with a module that it installs
    "plot": "matplotlib",
    "series": "sklearn",
    "rocket": "aeon",
    "forecast": "statsforecast",
    "export": "onnxscript",
}


def main() -> None:
    """Print the versions of hbnode and its dependencies, the devices, and which optional extras are installed."""
    packages = ("torch", "torchdiffeq", "torchsde", "numpy")
    devices = [f"CPU ({torch.get_num_threads()} threads)"]
    devices += [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices += ["MPS"] if torch.backends.mps.is_available() else []
    lines = [
        f"hbnode {hbnode.__version__}, Python {platform.python_version()}, {platform.platform()}",
        ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages),
        f"devices: {', '.join(devices)}",
    ]
    for extra, module in EXTRAS.items():
        fix = f"missing. Fix: pip install -e .[{extra}], in a checkout"
        lines.append(f"extra {extra}: {'installed' if importlib.util.find_spec(module) else fix}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
