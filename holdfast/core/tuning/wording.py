"""Says why loader settings cannot be changed, and what a change that is under way waits for."""

from __future__ import annotations

from itertools import islice

from holdfast.core.tuning.state import NAMED, TunedLoader, Tunings, is_open, named
from holdfast.core.view import View
from holdfast.messages.tuning import LoaderConfig
from holdfast.messages.units import Rank


def chosen(tunings: Tunings, dataset: str) -> str:
    """Return the data set that is meant; empty if that is not clear."""
    known = list(tunings.loaders)
    if dataset:
        return dataset if dataset in known else ""
    return known[0] if len(known) == 1 else ""


def refusal(tunings: Tunings, dataset: str, config: LoaderConfig, search: bool) -> str:
    """Return why settings cannot be changed so; empty if they can."""
    known = ", ".join(islice(tunings.loaders, NAMED))
    if not known:
        return (
            "no loader of the job can be tuned; ElasticDataLoader can, once the script has made it"
        )
    name = chosen(tunings, dataset)
    if not name:
        what = f"no data set is called {dataset}" if dataset else "it has several data sets"
        return f"{what}; choose one with --data: {known}"
    loader = tunings.loaders[name]
    if search and any(seat.most == 0 for seat in loader.seats.values()):
        return (
            f"another micro-batch would change the results of {name}; give its loader a global_batch"
            " to search for one"
        )
    most = min((seat.most for seat in loader.seats.values() if seat.most), default=0)
    if config.micro_batch is not None and most and config.micro_batch > most:
        return (
            f"micro-batch {config.micro_batch}: a rank has only {most} records in a step of {name}"
        )
    return ""


def pending(loader: TunedLoader, job: View) -> str | None:
    """Say what the change that is under way waits for; None if there is none."""
    wanted, proposal = loader.wanted, loader.proposal
    if wanted is None:
        return None
    what = f"{wanted.config} ({wanted.by})"
    if job.world is None:
        return f"{what}: waits for the next round"
    if proposal is not None and proposal.at_step is not None:
        return f"{what}: to be applied at the loader's step {proposal.at_step}"
    if job.unfinished < len(job.ranks):
        return f"{what}: not applied any more, because a rank has finished"
    if proposal is None and not is_open(loader, job):
        absent = named(absentees(loader, job)) or "all ranks"
        return f"{what}: waits for {absent} to open the data set"
    return f"{what}: ranks are asked at which step they are"


def search_line(loader: TunedLoader) -> str | None:
    """Say what the search for a micro-batch does; None if there is none."""
    search = loader.search
    if search is None:
        return None
    tried = ", ".join(map(str, search.trials)) or "nothing measured yet"
    return f"ended: {search.over}" if search.over else f"searching: {tried}"


def absentees(loader: TunedLoader, job: View) -> list[Rank]:
    """Return the first ranks that have not opened the data set in this round."""
    absent = (r for r, s in job.ranks.items() if r not in loader.seats and not s.finished)
    return list(islice(absent, NAMED))
