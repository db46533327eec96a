import subprocess
import sys

# In a process of its own: that of the tests may give memory back in between.
_SCRIPT = """
import subprocess, sys
from runtime.bench.memory import PeakMemory, process_tree

allocate = "import time; x = b'x' * (64 << 20); print('ready', flush=True); time.sleep(60)"
with PeakMemory(period_s=0.05) as alone:
    pass
with PeakMemory(period_s=0.05) as memory:
    child = subprocess.Popen([sys.executable, "-c", allocate], stdout=subprocess.PIPE)
    child.stdout.readline()
    assert child.pid in process_tree(memory.pid)
    memory._sample()
    child.kill()
    child.communicate()
print(memory.peak_bytes - alone.peak_bytes)
"""


def test_children_count_and_the_peak_is_kept() -> None:
    found = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 60 << 20
