"""On each host of a job: passes signals to its processes, and ends them when the job ends or contact is lost.

Started over ssh by `launch.host_links`. It reads words from its standard input, one a line: `beat`, which it answers,
`signal N`, `end`. After the end, or without a word for the time-out, no process of the job is left on this host.
"""

import dataclasses
import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from launch.rank import JOB_VARIABLE, read_failures

SECONDS_TO_SAVE = 10.0


def job_processes(launch_id: str) -> list[psutil.Process]:
    """The processes here that belong to any attempt of a launch."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(JOB_VARIABLE, "").split(".")[0] == launch_id:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def signal_ranks(launch_id: str, number: int) -> None:
    """Send a signal to the `launch.rank` processes here, which pass it on to the command each of them runs."""
    for process in job_processes(launch_id):
        try:
            if "launch.rank" in process.cmdline():
                process.send_signal(number)
        except psutil.Error:
            continue


def end_processes(launch_id: str) -> None:
    """Kill all processes of a launch here; new ones that appear meanwhile too."""
    while processes := job_processes(launch_id):
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=5)


def attend(launch_id: str, log_folder: Path, timeout_seconds: float) -> None:
    """Serve one attempt of a job until its end."""
    end_processes(launch_id)
    words: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_read_words, args=(words,), daemon=True)
    reader.start()
    _answer("ready")
    while True:
        try:
            word = words.get(timeout=timeout_seconds)
        except queue.Empty:
            word = ""
        if word == "beat":
            _answer("beat")
        elif word.startswith("signal "):
            signal_ranks(launch_id, int(word.split()[1]))
        else:
            break
    if word != "end":
        # The launching side is gone. What can still save alone does so.
        signal_ranks(launch_id, signal.SIGTERM)
        deadline = time.monotonic() + SECONDS_TO_SAVE
        while job_processes(launch_id) and time.monotonic() < deadline:
            time.sleep(0.2)
    end_processes(launch_id)
    for failure in read_failures(log_folder):
        _answer(json.dumps(dataclasses.asdict(failure)))


def _read_words(words: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        words.put(line.strip())
    words.put("")


def _answer(text: str) -> None:
    try:
        os.write(sys.stdout.fileno(), (text + "\n").encode())
    except OSError:
        return


if __name__ == "__main__":
    attend(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
