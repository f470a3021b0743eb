"""CPU seconds of tests: measured in each run of the suite, and a committed table that orders the files.

`pytest --record-cpu` brings the table up to date with what it ran. A second is one of a machine on which a fixed loop
takes `LOOP`: each process times this loop before its first test and after its last one, and seconds are divided by the
mean of these times over `LOOP`.
"""

import json
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from fastvit_triton.files import replacing

TABLE = Path(__file__).with_name("cpu_seconds.json")
LOOP = 0.050  # a second of the table is one of a machine whose `loop` takes this long
LONG = 1.0  # a case above this has a row of its own, others share that of their function
BUDGET = 520  # of the tests of the default run


def spent() -> float:
    """CPU seconds of this process and of its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def loop() -> float:
    """CPU seconds of a fixed loop over objects and small arrays: the least of five, since a machine's speed varies."""
    times = []
    for _ in range(5):
        start, values, table = time.process_time(), np.ones((32, 32)) / 32, {}
        for i in range(100_000):
            table[i % 1000] = (i, str(i))
            if i % 8 == 0:
                values = values @ values
        times.append(time.process_time() - start)
    return min(times)


def read() -> dict[str, dict[str, dict[str, float]]]:
    """The table: "default" or "full" → file → function, "function[case]" or "fixture name" → seconds.

    The row of a function is the mean of those cases that have no row of their own.
    """
    return json.loads(TABLE.read_text())


def ring(item: pytest.Item) -> str:
    """The part of the table that has a test."""
    return "default" if item.get_closest_marker("full") is None else "full"


def expected(items: Iterable[pytest.Item]) -> Counter[str]:
    """File → CPU seconds that these tests will take by the table, without shared fixtures."""
    table, sums = read(), Counter()
    for item in items:
        rows = table[ring(item)].get(item.path.stem, {})
        sums[item.path.stem] += rows.get(item.name, rows.get(item.name.partition("[")[0], 0.0))
    return sums


class Recorder:
    """pytest plugin: measures each test, and reports the sums in the process that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
        self.tests: Counter[tuple[str, str, str]] = Counter()  # (ring, file, test or "fixture name")
        self.collecting: list[float] = []  # of each process: until its first test
        self.loops: list[float] = []
        self._last = 0.0
        self._shared: Counter[str] = Counter()  # fixtures that were set up since the last report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Times the loop; collection ends here."""
        self.collecting.append(spent())
        if self.whole:
            self.loops.append(loop())

    def pytest_runtest_logstart(self) -> None:
        """Starts the clock of a test."""
        self._last = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        """Counts a fixture that tests share by itself."""
        start = spent()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._shared[f"fixture {fixturedef.argname}"] += spent() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Puts the seconds of a phase into its report, which workers send."""
        report = yield
        now, where, shared = spent(), (ring(item), item.path.stem), self._shared
        report.cpu = [(*where, item.name, now - self._last - shared.total()), *((*where, *s) for s in shared.items())]
        self._last, self._shared = now, Counter()
        return report

    def pytest_runtest_logreport(self, report) -> None:
        """Adds what a report says."""
        for *test, seconds in getattr(report, "cpu", ()):
            self.tests[tuple(test)] += seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        """Adds what a worker says at its end."""
        found = getattr(node, "workeroutput", {})
        self.collecting += found.get("collecting", ())
        self.loops += found.get("loops", ())

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Sends the worker's times; writes the table."""
        if self.whole:
            self.loops.append(loop())
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput |= dict(collecting=self.collecting, loops=self.loops)
            return
        if self.config.getoption("--record-cpu"):
            write(self.tests, self.slower(), self.whole and self.is_default())

    def is_default(self) -> bool:
        """True in a run of the tests that run without -m."""
        return self.config.getoption("markexpr") == self.config.getini("addopts")[-1]

    def slower(self) -> float:
        """How much slower than the machine of the table this one ran."""
        return float(np.mean(self.loops)) / LOOP if self.loops else 1.0

    def total(self) -> float:
        """Seconds of all tests and of the fixtures that they share."""
        return self.tests.total() / self.slower()

    def pytest_terminal_summary(self, terminalreporter) -> None:
        """Prints the sum, the longest files and the cases of the default run that are too long."""
        if not self.whole or not self.tests:
            return
        slower, files = self.slower(), Counter()
        for (_, file, _), seconds in self.tests.items():
            files[file.removeprefix("test_")] += seconds / slower
        line = f"{self.total():.0f} CPU seconds of tests, {sum(self.collecting) / slower:.0f} of collection"
        terminalreporter.write_line(f"{line} (divided by {slower:.2f}, the time of the loop over the table's); most in")
        terminalreporter.write_line(", ".join(f"{file} {seconds:.0f}" for file, seconds in files.most_common(12)))
        if self.is_default():
            long = {test: seconds / slower for test, seconds in self.tests.items() if seconds > LONG * slower}
            terminalreporter.write_line(f"{len(long)} cases and fixtures above {LONG:g} s")
            if self.total() > BUDGET:
                terminalreporter.write_line(f"above the budget of {BUDGET} s: mark the longest tests full", red=True)


def write(tests: Counter[tuple[str, str, str]], slower: float, default: bool = False) -> None:
    """Brings the table up to date: rows of tests that did not run stay, and small changes are left out.

    After a whole default run, rows of tests that are no longer in it become those of full tests.
    """
    table, short = read(), defaultdict(list)
    if default:
        ran = {(file, name.partition("[")[0]) for _, file, name in tests}
        for file, rows in table["default"].items():
            for name in [name for name in rows if (file, name.partition("[")[0]) not in ran]:
                table["full"].setdefault(file, {}).setdefault(name, rows.pop(name))
            for name in [name for name in rows if "[" in name and ("default", file, name) not in tests]:
                table["full"].setdefault(file, {}).setdefault(name, rows.pop(name))
    for (ring, file, name), seconds in tests.items():
        seconds /= slower
        rows = table[ring].setdefault(file, {})
        if "[" in name and seconds <= LONG:
            rows.pop(name, None)
            short[ring, file, name.partition("[")[0]].append(seconds)
        else:
            put(rows, name, seconds)
    for (ring, file, function), found in short.items():
        put(table[ring][file], function, float(np.mean(found)))
    for ring, files in table.items():
        kept = {file: {name: s for name, s in sorted(rows.items()) if s} for file, rows in sorted(files.items())}
        table[ring] = {file: rows for file, rows in kept.items() if rows}
    with replacing(TABLE) as temporary:
        temporary.write_text(json.dumps(table, indent=0) + "\n")


def put(rows: dict[str, float], name: str, seconds: float) -> None:
    """Sets a row unless it differs by less than a quarter; a row below 0.01 seconds is left out."""
    old = rows.get(name, 0.0)
    if abs(seconds - old) > 0.25 * max(seconds, old):
        rows[name] = round(seconds, 2)
