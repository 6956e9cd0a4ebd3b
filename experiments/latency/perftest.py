"""perftest's programs (``ib_write_bw``, ``ib_write_lat``) between two processes of this host: the limit of an RDMA device."""

import shutil
import subprocess
import time
from dataclasses import dataclass

PROGRAMS = ("ib_write_bw", "ib_write_lat")
_TRIES = 50


@dataclass(frozen=True)
class Perftest:
    """``device`` and ``gid_index`` as the RDMA device chose them. Raises ``RuntimeError`` where a run fails."""

    device: str
    gid_index: int
    timeout_s: float = 120.0

    def bandwidth(self, size: int, times: int) -> float:
        """Bytes a second of so many WRITEs of ``size`` bytes, as many in flight as the program likes."""
        mebibytes = self._run("ib_write_bw", size, times)[3]
        return float(mebibytes) * (1 << 20)

    def latency_us(self, size: int, times: int) -> float:
        """Microseconds of one way: half of the median round trip."""
        return float(self._run("ib_write_lat", size, times)[4])

    def _run(self, program: str, size: int, times: int) -> list[str]:
        """The columns of the line that a run prints."""
        wanted = ("-d", self.device, "-x", str(self.gid_index), "-F", "-s", str(size), "-n", str(times))
        if shutil.which(program) is None:
            raise RuntimeError(f"{program} is not installed (apt install perftest)")
        with subprocess.Popen([program, *wanted], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                for _ in range(_TRIES):
                    client = [program, *wanted, "127.0.0.1"]
                    done = subprocess.run(client, capture_output=True, text=True, timeout=self.timeout_s, check=False)
                    if done.returncode == 0:
                        server.wait(self.timeout_s)
                        return _columns(done.stdout, size)
                    if server.poll() is not None:
                        break
                    time.sleep(0.1)  # the server does not listen yet
            finally:
                server.kill()
        raise RuntimeError(f"{program} failed: {done.stdout[-500:]}{done.stderr[-500:]}")


def _columns(printed: str, size: int) -> list[str]:
    for line in printed.splitlines():
        columns = line.split()
        if len(columns) >= 5 and columns[0] == str(size):
            return columns
    raise RuntimeError(f"no line for {size} bytes in: {printed[-500:]}")
