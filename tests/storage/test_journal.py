from __future__ import annotations

import gc
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from kvkeep.records import GenerateReport
from kvkeep.storage.fs import Directory
from kvkeep.storage.journal import Journal, Totals, Use

KEY, OTHER = "ab" * 16, "cd" * 16


def report(reused: int, *, reason: str | None = None, key: str | None = None, seconds: float = 0.0) -> GenerateReport:
    return GenerateReport(prompt_tokens=100, reused_tokens=reused, reason=reason, load_seconds=seconds, key=key)


def lines(root: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in sorted((root / "journal").iterdir()) for line in path.read_text().splitlines()]


def run(code: str, root: Path) -> None:
    prelude = """
import os, sys
from pathlib import Path
from kvkeep.storage.fs import Directory
from kvkeep.storage.journal import Journal
journal = Journal(Directory(Path(sys.argv[1])))
"""
    subprocess.run([sys.executable, "-c", prelude + code, str(root)], check=True)


def test_totals_are_the_sums_of_all_events(tmp_path: Path):
    journal = Journal(Directory(tmp_path))
    journal.prefilled(300, 1.5)
    journal.stored(4096, 0.25)
    journal.generated(report(60, key=KEY, seconds=0.125))
    journal.generated(report(40, key=KEY, seconds=0.125))
    journal.generated(report(5, key=OTHER, reason="diverged: at token 5"))
    journal.generated(report(0, reason="prefix: secret words"))
    journal.generated(report(0, reason="prefix"))
    journal.generated(report(0))
    journal.damaged(KEY)
    totals = journal.totals()
    uses = {key: (use.hits, use.last > 1_700_000_000) for key, use in totals.uses.items()}
    assert uses == {KEY: (2, True), OTHER: (1, True)}
    assert totals == Totals(
        hits=3,
        misses={"prefix": 2, "unknown": 1},
        reused_tokens=105,
        load_seconds=0.25,
        prefills=1,
        prefilled_tokens=300,
        prefill_seconds=1.5,
        stored=1,
        stored_bytes=4096,
        store_seconds=0.25,
        damaged=1,
        uses=totals.uses,
    )
    assert journal.totals() == totals  # nothing is counted twice


def test_a_batch_is_one_line_of_a_private_file_of_this_process(tmp_path: Path):
    journal = Journal(Directory(tmp_path), interval=3600)
    for _ in range(1000):
        journal.hit(None, 7, 0.001)
    journal.miss("prefix: secret words")
    assert not (tmp_path / "journal").exists()
    journal.flush()
    journal.flush()
    (path,) = (tmp_path / "journal").iterdir()
    assert path.name.startswith(f"{os.getpid()}-")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == (
        '{"hits":1000,"load_us":1000000,"misses":{"prefix":1},"reused_tokens":7000,"uses":{}}\n'
    )


def test_an_event_flushes_when_the_last_flush_is_long_ago(tmp_path: Path):
    journal = Journal(Directory(tmp_path), interval=0)
    journal.prefilled(1, 0)
    journal.prefilled(2, 0)
    assert [line["prefilled_tokens"] for line in lines(tmp_path)] == [1, 2]


def test_a_process_flushes_when_it_ends(tmp_path: Path):
    run("journal.prefilled(5, 0)", tmp_path)
    run("journal.prefilled(6, 0)", tmp_path)
    totals = Journal(Directory(tmp_path)).totals()
    assert (totals.prefills, totals.prefilled_tokens) == (2, 11)
    assert len(list((tmp_path / "journal").iterdir())) == 2


def test_a_journal_flushes_when_it_is_dropped(tmp_path: Path):
    journal = Journal(Directory(tmp_path))
    journal.prefilled(5, 0)
    del journal
    gc.collect()
    assert [line["prefilled_tokens"] for line in lines(tmp_path)] == [5]


def test_a_forked_child_counts_for_itself_and_only_its_own_events(tmp_path: Path):
    code = """
journal.prefilled(1, 0)
child = os.fork()
journal.prefilled(20 if child == 0 else 300, 0)
if child:
    os.waitpid(child, 0)
"""
    run(code, tmp_path)
    assert sorted(line["prefilled_tokens"] for line in lines(tmp_path)) == [20, 301]
    assert len(list((tmp_path / "journal").iterdir())) == 2


def test_lines_that_make_no_sense_are_passed_over(tmp_path: Path):
    Journal(Directory(tmp_path)).prefilled(5, 0)
    gc.collect()
    (path,) = (tmp_path / "journal").iterdir()
    good = path.read_bytes()
    bad = [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"misses":{},"uses":{},"prefills":-1}',
        b'{"misses":{},"uses":{},"prefills":1.5}',
        b'{"misses":{},"uses":{},"prefills":true}',
        b'{"misses":{"x":"y"},"uses":{},"prefills":1}',
        b'{"misses":{},"uses":{"k":[1]},"prefills":1}',
        b'{"misses":{},"uses":{"k":3},"prefills":1}',
        b'{"uses":{},"prefills":1}',
        good[: len(good) // 2],
    ]
    path.write_bytes(b"\n".join(bad) + b"\n" + good + good[:-5])
    (tmp_path / "journal" / "dir.jsonl").mkdir()
    (tmp_path / "journal" / "link.jsonl").symlink_to(path)
    (tmp_path / "journal" / "other.txt").write_bytes(good)
    totals = Journal(Directory(tmp_path)).totals()
    assert totals == Totals(prefills=1, prefilled_tokens=5)


def test_the_latest_use_counts(tmp_path: Path):
    (tmp_path / "journal").mkdir()
    for name, hits, last in (("a", 2, 500), ("b", 3, 400)):
        line = {"hits": hits, "misses": {}, "uses": {KEY: [hits, last]}}
        (tmp_path / "journal" / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    assert Journal(Directory(tmp_path)).totals().uses == {KEY: Use(hits=5, last=500)}


def test_a_read_only_store_keeps_no_journal_but_shows_the_one_there(tmp_path: Path):
    first = Journal(Directory(tmp_path))
    first.prefilled(5, 0)
    first.flush()
    journal = Journal(Directory(tmp_path, readonly=True), interval=0)
    journal.prefilled(6, 0)
    journal.flush()
    assert journal.totals().prefilled_tokens == 5
    assert len(list((tmp_path / "journal").iterdir())) == 1


def test_a_journal_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "journal").write_text("in the way")
    journal = Journal(Directory(tmp_path), interval=0)
    journal.prefilled(5, 0)
    journal.flush()
    assert (tmp_path / "journal").read_text() == "in the way"


def test_uses_are_known_to_the_last_hit_here_and_to_the_last_flush_elsewhere(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 500.5)
    here, there = Journal(Directory(tmp_path)), Journal(Directory(tmp_path))
    assert here.uses() == {}
    there.hit(KEY, 10, 0.1)
    assert here.uses() == {}
    there.flush()
    here.hit(KEY, 10, 0.1)
    here.hit(OTHER, 10, 0.1)
    for _ in range(3):
        assert here.uses() == {KEY: Use(2, 500), OTHER: Use(1, 500)}, "nothing is counted twice"
        here.flush()
    monkeypatch.setattr(time, "time", lambda: 600.5)
    there.hit(KEY, 10, 0.1)
    there.flush()
    assert here.uses() == {KEY: Use(3, 600), OTHER: Use(1, 500)} == here.totals().uses
    assert Journal(Directory(tmp_path, readonly=True)).uses() == here.uses()


def test_uses_read_only_what_is_new_and_wait_for_the_end_of_a_line(tmp_path: Path, monkeypatch):
    (tmp_path / "journal").mkdir()
    path = tmp_path / "journal" / "a.jsonl"
    line = json.dumps({"hits": 1, "misses": {}, "uses": {KEY: [1, 7]}}) + "\n"
    path.write_text(line * 3 + line[:9])
    journal = Journal(Directory(tmp_path))
    assert journal.uses() == {KEY: Use(3, 7)}
    path.write_text(line * 5)
    assert journal.uses() == {KEY: Use(5, 7)}
    monkeypatch.setattr(Directory, "open_read", None)
    assert journal.uses() == {KEY: Use(5, 7)}


def test_uses_of_a_journal_that_cannot_be_read_are_none(tmp_path: Path):
    (tmp_path / "journal").write_text("in the way")
    assert Journal(Directory(tmp_path)).uses() == {}
