"""Who is started again, and who is not. Both children are functions here, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from holdfast.agent.orders import AgentOrders
from holdfast.jobhome import JobHome
from holdfast.launch import process
from holdfast.launch.child import MAX_DEATHS
from holdfast.launch.orders import agent_orders, node_of
from holdfast.launch.process import Launcher
from holdfast.launch.site import Site
from holdfast.messages.records import Terms

PLAY = """
    import logging, os, signal, sys, time
    from holdfast.launch.orders import node_of
    from holdfast.launch.child import Child
    from holdfast.launch.parent import JobEnd
    from holdfast.launch.process import Launcher

    def noted(word):
        return os.path.exists(word)

    def note(word):
        open(word, "a").close()

    def wait_for(found):
        while not found():
            time.sleep(0.01)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def coordinator_gone():
        return noted("coordinator began") and not os.path.exists(f"/proc/{{open('pid').read()}}")

    def begin_coordinator():
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        note("coordinator began")

    {agent}
    {coordinator}

    def read_end():
        known = [] if noted("agent came late") else [node_of(launcher.agent.pid, launcher.launch)]
        return JobEnd(0, frozenset(known))

    logging.basicConfig(format="%(message)s")
    children = Child("agent", agent), Child("coordinator", coordinator)
    launcher = Launcher(frozenset({{signal.SIGTERM}}), *children, True, read_end)
    code = launcher.run()
    launcher.listen_again()
    sys.exit(code)
"""


def play(folder: Path, agent: str, coordinator: str) -> subprocess.CompletedProcess[str]:
    """Run a launcher with these two."""
    parts = {"agent": textwrap.dedent(agent), "coordinator": textwrap.dedent(coordinator)}
    text = textwrap.dedent(PLAY).format(**parts)
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_an_agent_that_dies_while_the_job_goes_on_is_started_again(tmp_path: Path) -> None:
    agent = """
    def agent():
        if not noted("agent died"):
            note("agent died")
            die()
        note("agent left")
        return 7
    """
    coordinator = """
    def coordinator():
        wait_for(lambda: noted("agent left"))
        return 0
    """
    done = play(tmp_path, agent, coordinator)
    assert done.returncode == 7, done.stderr
    assert "the agent was killed by signal 9; starting it again" in done.stderr


def test_an_agent_that_dies_after_the_job_has_ended_is_not_started_again(tmp_path: Path) -> None:
    agent = """
    def agent():
        wait_for(coordinator_gone)
        die()
    """
    coordinator = """
    def coordinator():
        begin_coordinator()
        return 0
    """
    done = play(tmp_path, agent, coordinator)
    assert done.returncode == 0, done.stderr
    assert "the agent was killed by signal 9 after the end of the job" in done.stderr
    assert "starting it again" not in done.stderr


def test_an_agent_that_was_started_too_late_for_the_jobs_end_does_not_wait_for_it(
    tmp_path: Path,
) -> None:
    agent = """
    def agent():
        if not noted("agent died"):
            note("agent died")
            die()
        note("agent came late")
        wait_for(lambda: False)
    """
    coordinator = """
    def coordinator():
        wait_for(lambda: noted("agent came late"))
        return 0
    """
    done = play(tmp_path, agent, coordinator)
    assert done.returncode == 0, done.stderr


def test_an_agent_that_was_started_again_and_joined_ends_in_its_own_way(tmp_path: Path) -> None:
    agent = """
    def agent():
        if not noted("agent died"):
            note("agent died")
            die()
        note("agent left")
        wait_for(coordinator_gone)
        return 7
    """
    coordinator = """
    def coordinator():
        begin_coordinator()
        wait_for(lambda: noted("agent left"))
        return 0
    """
    done = play(tmp_path, agent, coordinator)
    assert done.returncode == 7, done.stderr


def test_a_signal_that_comes_when_all_is_over_does_not_change_how_the_launcher_ends(
    tmp_path: Path,
) -> None:
    """What follows, such as the removal of its images, is not to be cut off by it."""
    agent = """
    def agent():
        return 7
    """
    coordinator = """
    def coordinator():
        return 0

    end_orphans = Launcher._end_orphans
    def signalled(launcher):
        end_orphans(launcher)
        os.kill(os.getpid(), signal.SIGTERM)
    Launcher._end_orphans = signalled
    """
    done = play(tmp_path, agent, coordinator)
    assert done.returncode == 7, done.stderr


def test_a_node_that_the_coordinator_refused_ends_with_2_and_is_not_started_again(
    tmp_path: Path,
) -> None:
    agent = """
    def agent():
        from holdfast.messages.exits import EXIT_REFUSED
        return EXIT_REFUSED
    """
    coordinator = """
    def coordinator():
        wait_for(lambda: False)
    """
    done = play(tmp_path, agent, coordinator)
    assert done.returncode == 2, done.stderr
    assert "starting it again" not in done.stderr


def test_an_agent_that_was_fenced_is_started_again_however_often_that_happens(
    tmp_path: Path,
) -> None:
    agent = """
    def agent():
        from holdfast.launch.child import MAX_DEATHS
        from holdfast.messages.exits import EXIT_REJOIN
        with open("lives", "a+") as file:
            file.write("x")
            file.seek(0)
            lives = len(file.read())
        return EXIT_REJOIN if lives <= MAX_DEATHS + 1 else 7
    """
    coordinator = """
    def coordinator():
        wait_for(lambda: noted("lives") and os.path.getsize("lives") > 6)
        return 0
    """
    done = play(tmp_path, agent, coordinator)
    assert done.returncode == 7, done.stderr
    assert len((tmp_path / "lives").read_text()) == MAX_DEATHS + 2


def test_an_agent_that_dies_again_and_again_ends_the_launcher(tmp_path: Path) -> None:
    agent = """
    def agent():
        with open("lives", "a") as file:
            file.write("x")
        die()
    """
    coordinator = """
    def coordinator():
        wait_for(lambda: False)
    """
    done = play(tmp_path, agent, coordinator)
    assert done.returncode != 0
    assert len((tmp_path / "lives").read_text()) == MAX_DEATHS + 1


def test_a_restarted_agent_knows_whose_place_it_takes(tmp_path: Path) -> None:
    agent = """
    def agent():
        from holdfast.messages.exits import EXIT_REJOIN
        with open("lives", "a+") as file:
            file.write(f"{launcher.agent.pid_before} {os.getpid()}\\n")
            file.seek(0)
            lives = len(file.readlines())
        return {1: EXIT_REJOIN, 3: 7}.get(lives) or die()
    """
    coordinator = """
    def coordinator():
        wait_for(lambda: noted("lives") and len(open("lives").readlines()) == 3)
        return 0
    """
    done = play(tmp_path, agent, coordinator)
    assert done.returncode == 7, done.stderr
    lives = [line.split() for line in (tmp_path / "lives").read_text().splitlines()]
    before = [before for before, _ in lives]
    pids = [pid for _, pid in lives]
    assert before == ["0", *pids[:-1]]


# ---- ids of nodes ----


def orders(tmp_path: Path, launch: str, agent_before: int) -> AgentOrders:
    home = JobHome(tmp_path)
    site = Site("127.0.0.1", 1, "t", home, None)
    settings: Any = MagicMock(log_dir=None)
    settings.rendezvous = MagicMock(coordinator="127.0.0.1:1", master_addr=None, master_port=None)
    settings.terms = Terms()
    return agent_orders(settings, site, tmp_path, launch, agent_before)


def test_two_launchers_of_one_host_have_nodes_of_different_ids() -> None:
    """In containers, hosts have the same name and agents the same pid."""
    assert node_of(7, "aaaa") != node_of(7, "bbbb")
    assert node_of(7, "aaaa") != node_of(8, "aaaa")


def test_each_launcher_draws_its_part_of_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    def run(launcher: Launcher) -> int:
        drawn.append(launcher.launch)
        return 0

    site = Site("127.0.0.1", 1, "t", JobHome(tmp_path), None)
    monkeypatch.setattr(process, "make_directories", lambda settings: None)
    monkeypatch.setattr(process, "find_site", lambda settings: site)
    monkeypatch.setattr(Launcher, "run", run)
    for _ in range(2):
        settings: Any = MagicMock(image_dir=str(tmp_path / "images"), signals_to_handle=())
        process.launch(settings, 0.0)
    assert len(set(drawn)) == 2
    assert all(drawn)


def test_the_orders_of_an_agent_name_it_and_the_one_before_it(tmp_path: Path) -> None:
    first = orders(tmp_path, "aaaa", 0)
    assert first.node == node_of(os.getpid(), "aaaa")
    assert first.replaces == ""
    later = orders(tmp_path, "aaaa", 4242)
    assert later.node == first.node
    assert later.replaces == node_of(4242, "aaaa")
    assert orders(tmp_path, "bbbb", 4242).replaces != later.replaces
