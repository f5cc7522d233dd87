"""Restart a job that failed, on the hosts that still answer, until it is done or restarts are of no use."""

import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launch.attempt import INTERRUPTED, Outcome
from launch.ssh import answers
from lex_pretrain.config import Config
from lex_pretrain.errors import JobError, RequestError, StoppedError
from lex_pretrain.progress import logger

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 300.0
SECONDS_BETWEEN_LOOKS = 10.0
LONGEST_WAIT_SECONDS = 600.0
# Attempts in a row that end without a new checkpoint, after which another would only fail in the same way.
MOST_FRUITLESS_ATTEMPTS = 2

RunAttempt = Callable[[int, dict[str, int] | None], Outcome]


@dataclass(frozen=True)
class Patience:
    """How often to start again, and on how few hosts."""

    max_restarts: int = 0
    min_hosts: int | None = None


def supervise(run_attempt: RunAttempt, slots: dict[str, int] | None, patience: Patience, config: Config | None) -> int:
    """Run attempts until one ends well or no other may follow; returns the job's exit code.

    `run_attempt` gets the attempt's number and the hosts to use, None for this host alone. `config` is that of the
    training, None for other commands. Raises JobError when too few hosts are left or a run makes no progress.
    """
    fruitless = 0
    chosen = slots
    for attempt in range(patience.max_restarts + 1):
        if attempt and slots is not None:
            chosen = hosts_to_use(slots, patience.min_hosts or len(slots), config)
        checkpoint = newest_checkpoint(config)
        outcome = run_attempt(attempt, chosen)
        if outcome.exit_code in (0, INTERRUPTED, StoppedError.exit_code):
            return outcome.exit_code
        logger.error("%s", describe(outcome))
        is_last = outcome.told_to_stop or attempt == patience.max_restarts
        if outcome.exit_code == RequestError.exit_code or is_last:
            return outcome.exit_code
        moved = newest_checkpoint(config) != checkpoint
        fruitless = 0 if moved or outcome.lost_hosts or config is None else fruitless + 1
        if fruitless == MOST_FRUITLESS_ATTEMPTS:
            raise JobError(
                f"stopped: {fruitless} attempts in a row ended without a new checkpoint (the newest is "
                f"{checkpoint or 'none'}); another would end in the same way"
            )
        pause_seconds = min(FIRST_PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE_SECONDS)
        logger.info("restart %d of %d in %.0f s", attempt + 1, patience.max_restarts, pause_seconds)
        time.sleep(pause_seconds)
    raise AssertionError("unreachable: the last attempt returns")


def hosts_to_use(slots: Mapping[str, int], min_hosts: int, config: Config | None) -> dict[str, int]:
    """Hosts that answer, as many as the batch arithmetic of `config` allows; waits for `min_hosts` of them.

    Raises JobError when they do not come back in time.
    """
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while True:
        with ThreadPoolExecutor(max_workers=len(slots)) as pool:
            alive = [host for host, alive in zip(slots, pool.map(answers, slots), strict=True) if alive]
        chosen = largest_that_fits({host: slots[host] for host in alive}, config)
        silent = ", ".join(host for host in slots if host not in alive)
        if len(chosen) >= min_hosts:
            if len(chosen) < len(slots):
                logger.warning("going on with %s%s", ", ".join(chosen), f"; no answer from {silent}" if silent else "")
            return chosen
        if time.monotonic() > deadline:
            raise JobError(
                f"{len(chosen)} hosts can be used ({', '.join(chosen) or 'none'}) where {min_hosts} are needed; no "
                f"answer from {silent or 'none'} for {LONGEST_WAIT_SECONDS:.0f} s. --min-hosts allows fewer"
            )
        logger.warning("waiting for hosts: no answer from %s", silent or "none, but the batch needs another number")
        time.sleep(SECONDS_BETWEEN_LOOKS)


def largest_that_fits(slots: Mapping[str, int], config: Config | None) -> dict[str, int]:
    """As many of the first hosts as have a number of processes that divides the global batch; none if none do."""
    hosts = list(slots)
    for count in range(len(hosts), 0, -1):
        chosen = {host: slots[host] for host in hosts[:count]}
        if config is None:
            return chosen
        if config.train.smallest_batch_size % (sum(chosen.values()) * (config.train.micro_batch_size or 1)) == 0:
            return chosen
    return {}


def describe(outcome: Outcome) -> str:
    """What failed, in one message: the first process to fail, its host and its last words, and lost hosts."""
    lines = [f"lost contact with host {host}" for host in outcome.lost_hosts]
    if not outcome.failures:
        lines.append(f"the job ended with {outcome.exit_code}")
        return "; ".join(lines)
    first = outcome.failures[0]
    how = f"with {first.exit_code}" if first.exit_code >= 0 else f"by {signal.Signals(-first.exit_code).name}"
    others = f"; then {len(outcome.failures) - 1} more" if len(outcome.failures) > 1 else ""
    lines.append(f"rank {first.rank} on {first.host} was ended {how}{others}; its log is {first.log_file} there")
    if first.kernel_message:
        lines.append(f"the kernel of {first.host} killed it for want of memory: {first.kernel_message}")
    # What rank 0 said stands on the screen already.
    if first.rank != 0 and first.last_lines:
        lines += ["its last lines:", *(f"  {line}" for line in first.last_lines)]
    return "\n".join(lines)


def newest_checkpoint(config: Config | None) -> str | None:
    """Name of the checkpoint that a plain restart of the training would take; None where there is none."""
    if config is None:
        return None
    try:
        return (Path(config.run.output_dir) / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
