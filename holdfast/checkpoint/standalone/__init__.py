"""Saves and restores without `holdfast run`: the script has a keeper of its own.

It is the same protocol as under a coordinator, by the same rules (`holdfast.core.commits`). Each rank
is a node of its own, with a keeper as its child process. Rank 0 also runs the coordinator's part: its
driver receives the events of all ranks, applies the rules, and sends the actions.

    link            a rank: has its images sealed and written, reports, and waits for results
    driver          rank 0: events in, `core.commits`, actions out
    store_meeting   carries events to the driver and actions to the ranks, by torch's store
    keeper_client   the keeper, as a script sees it

`Checkpointer` uses a link outside of `holdfast run`, `AsyncWriter` everywhere. Without
torch.distributed the script is a world of one rank. Images live as long as the script, so what is
restored comes from storage.
"""
