import subprocess
import sys

from runtime.bench.memory import PeakMemory, process_tree

_ALLOCATE = "import time; x = b'x' * (64 << 20); print('ready', flush=True); time.sleep(60)"


def test_children_count_and_the_peak_is_kept() -> None:
    with PeakMemory(period_s=0.05) as alone:
        pass
    with PeakMemory(period_s=0.05) as memory:
        child = subprocess.Popen([sys.executable, "-c", _ALLOCATE], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in process_tree(memory.pid)
        memory._sample()
        child.kill()
        child.communicate()
    assert memory.peak_bytes > alone.peak_bytes + (60 << 20)
