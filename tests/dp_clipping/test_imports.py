"""How far down a reader must go: chains of modules that import each other, in which none is twice.

All imports count, those for type checkers and inside of functions too.
"""

import subprocess
import sys
from functools import cache

import pytest

grimp = pytest.importorskip("grimp")

GRAPH = grimp.build_graph("dp_clipping", exclude_type_checking_imports=False)
LONGEST = {"dp_clipping": 11, "capture": 6, "layers": 4, "kernels": 4, "clipping": 1}


@cache
def chain_from(module: str) -> tuple[str, ...]:
    """The longest chain that starts with a module; a cycle would not end."""
    below = [chain_from(name) for name in GRAPH.find_modules_directly_imported_by(module)]
    return (module, *max(below, key=len, default=()))


@pytest.mark.parametrize("room", LONGEST)
def test_chains_of_imports_are_short(room):
    package = room if room == "dp_clipping" else f"dp_clipping.{room}"
    modules = [name for name in GRAPH.modules if name == package or name.startswith(f"{package}.")]
    longest = max(map(chain_from, modules), key=len)
    assert len(longest) <= LONGEST[room], " -> ".join(longest)


def test_importing_the_engine_leaves_slow_packages_alone():
    program = (
        "import sys\n"
        "from dp_clipping import PrivacyEngine\n"
        "slow = 'torch.distributed.tensor', 'torch.distributed.checkpoint', 'torch._dynamo'\n"
        "print([name for name in slow if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
