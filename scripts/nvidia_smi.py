"""Reads a GPU's properties and state from nvidia-smi. A field that the driver does not report is "unknown": no function raises.

python3 nvidia_smi.py [PCI-ADDRESS] prints them as JSON. Needs only the standard library of Python 3.9.
"""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

UNKNOWN = "unknown"

# Seconds after which a call of nvidia-smi counts as failed. On a machine whose GPU hangs, nvidia-smi hangs too.
TIMEOUT = 30

# Name in the report, and paths below <gpu> in the output of `nvidia-smi -q -x`. The first path that exists counts: drivers have
# renamed fields.
FACTS = {
    "name": ("product_name",),
    "architecture": ("product_architecture",),
    "vbios": ("vbios_version",),
    "sm clock": ("clocks/sm_clock",),
    "sm clock, maximum": ("max_clocks/sm_clock",),
    "sm clock, applications": ("applications_clocks/graphics_clock",),
    "memory clock": ("clocks/mem_clock",),
    "memory clock, maximum": ("max_clocks/mem_clock",),
    "memory clock, applications": ("applications_clocks/mem_clock",),
    "power limit": ("gpu_power_readings/current_power_limit", "gpu_power_readings/power_limit", "power_readings/power_limit"),
    "power limit, default": ("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
    "persistence mode": ("persistence_mode",),
    "compute mode": ("compute_mode",),
    "ECC": ("ecc_mode/current_ecc",),
    "MIG": ("mig_mode/current_mig",),
    "display active": ("display_active",),
    "PCIe generation": ("pci/pci_gpu_link_info/pcie_gen/current_link_gen",),
    "PCIe generation, maximum": ("pci/pci_gpu_link_info/pcie_gen/max_link_gen",),
    "PCIe width": ("pci/pci_gpu_link_info/link_widths/current_link_width",),
    "PCIe width, maximum": ("pci/pci_gpu_link_info/link_widths/max_link_width",),
    "addressing mode": ("addressing_mode",),
    "memory": ("fb_memory_usage/total",),
    "memory protected by confidential computing": ("cc_protected_memory_usage/total",),
}

STATE = {
    "sm clock": ("clocks/sm_clock",),
    "memory clock": ("clocks/mem_clock",),
    "temperature": ("temperature/gpu_temp",),
    "memory temperature": ("temperature/memory_temp",),
    "power": (
        "gpu_power_readings/instant_power_draw",
        "gpu_power_readings/power_draw",
        "gpu_power_readings/average_power_draw",
        "power_readings/power_draw",
    ),
    "performance state": ("performance_state",),
    "memory used": ("fb_memory_usage/used",),
    "PCIe generation": ("pci/pci_gpu_link_info/pcie_gen/current_link_gen",),
}


def call(*arguments):
    """The output of nvidia-smi, or None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def text_of(element):
    text = (element.text or "").strip() if element is not None else ""
    return text or UNKNOWN


def first(gpu, paths):
    found = (text_of(gpu.find(path)) for path in paths) if gpu is not None else ()
    return next((text for text in found if text != UNKNOWN), UNKNOWN)


def leaves(element, prefix=""):
    """Every text below an element, by its path."""
    found = {}
    for child in element if element is not None else ():
        path = prefix + child.tag
        if len(child):
            found.update(leaves(child, path + "/"))
        else:
            found[path] = text_of(child)
    return found


def address(text):
    """A PCI address as numbers: nvidia-smi writes eight digits for the domain, the CUDA driver four."""
    match = re.fullmatch(r"\s*(?:([0-9a-f]+):)?([0-9a-f]+):([0-9a-f]+)\.([0-9a-f]+)\s*", (text or "").lower())
    return tuple(int(part or "0", 16) for part in match.groups()) if match else None


def query():
    """The root of the XML, or None."""
    try:
        return ElementTree.fromstring(call("-q", "-x") or "")
    except ElementTree.ParseError:
        return None


def find_gpu(root, pci):
    """The element of the GPU with this address. A single GPU is found without an address."""
    gpus = root.findall("gpu") if root is not None else []
    wanted = address(pci)
    for gpu in gpus:
        if wanted is not None and address(gpu.get("id")) == wanted:
            return gpu
    return gpus[0] if wanted is None and len(gpus) == 1 else None


def lines_of(*arguments):
    """The lines of a text output without terminal colours; UNKNOWN if there are none."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", call(*arguments) or "")
    return [line.rstrip() for line in text.splitlines() if line.strip()] or UNKNOWN


def facts(pci=None):
    """What does not change during a run."""
    root = query()
    gpu = find_gpu(root, pci)
    found = {
        "driver": first(root, ("driver_version",)),
        "CUDA": first(root, ("cuda_version",)),
        **{name: first(gpu, paths) for name, paths in FACTS.items()},
        "ECC errors": leaves(gpu.find("ecc_errors")) if gpu is not None else UNKNOWN,
        "confidential computing": lines_of("conf-compute", "-f"),
    }
    if root is not None and len(root.findall("gpu")) > 1:
        # r: read, w: write access of each GPU to the memory of each other one.
        found["peer access, read"] = lines_of("topo", "-p2p", "r")
        found["peer access, write"] = lines_of("topo", "-p2p", "w")
        found["topology"] = lines_of("topo", "-m")
    return found


def state(pci=None):
    """What changes during a run: clocks, temperature, and what lowers the clocks."""
    gpu = find_gpu(query(), pci)
    found = {name: first(gpu, paths) for name, paths in STATE.items()}
    # Renamed by driver 535.
    reasons, counters = UNKNOWN, UNKNOWN
    for word in ("event", "throttle"):
        block = gpu.find(f"clocks_{word}_reasons") if gpu is not None else None
        if block is not None and reasons == UNKNOWN:
            prefix = f"clocks_{word}_reason_"
            active = [path for path, text in leaves(block).items() if text.lower() == "active"]
            reasons = [path[len(prefix) :] if path.startswith(prefix) else path for path in active]
        block = gpu.find(f"clocks_{word}_reasons_counters") if gpu is not None else None
        if block is not None and counters == UNKNOWN:
            counters = {path.rsplit("counters_", 1)[-1]: text for path, text in leaves(block).items()}
    found["clocks lowered by"] = reasons
    found["time with lowered clocks"] = counters
    found["ECC errors"] = leaves(gpu.find("ecc_errors/volatile")) if gpu is not None else UNKNOWN
    return found


if __name__ == "__main__":
    pci = sys.argv[1] if len(sys.argv) > 1 else None
    print(json.dumps({"facts": facts(pci), "state": state(pci)}, indent=1))
