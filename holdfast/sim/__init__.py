"""A simulated cluster around the real core.

Only the shells are simulated: the clock is a heap of things to come (`clock`), a stream is a queue
with a delay (`network`), an agent is a small machine that does with orders what the real one does
(`agent`), and the coordinator is an inbox, a journal in memory and the very functions of
`holdfast.core.job` (`coordinator`). What the workers of a round have really done is computed, not
stepped through (`training`): as long as nothing happens to a round its step is a function of time,
so an hour without faults costs nothing, and ten thousand nodes fit into one process.

`faults` says how often what goes wrong, `mishaps` makes it happen, `cluster` holds hosts, agents and
coordinator together, `invariants` looks over everybody's shoulder and `report` says what was seen.

All chance comes from one seed, and nothing depends on the order of a set or on the wall clock: one
seed gives one event log, byte for byte. A seed that breaks an invariant is therefore a test.

What the simulated network does to messages is what TCP and our numbering allow: they are late, they
stop coming, they are lost together with the stream from some point on, and those that were not
acknowledged are sent again on the next one, so that the coordinator may see them twice. A crash of
the coordinator loses what was not journaled, or what was journaled and not yet acted upon.
"""
