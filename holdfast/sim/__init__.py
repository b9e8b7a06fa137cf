"""A simulated cluster over the real core and the real supervisor.

Only what surrounds them is simulated: the clock is a heap of callbacks (`clock`), asyncio code runs on
a loop over it (`loop`), a stream is a queue with a delay (`network`), and the coordinator is an inbox,
a journal in memory and the functions of `holdfast.core.job` (`coordinator`). Up to 64 nodes an agent
is the supervisor of `holdfast.agent` over simulated processes (`supervised`, `rank`), keeper and
storage (`keeper`) and node tests (`nodecheck`); beyond, a light model that leaves the same traces
(`agent`). What the workers of a round have really done is computed, not stepped through (`training`):
as long as nothing happens to a round its step is a function of time, so an hour without faults costs
nothing, and ten thousand nodes fit into one process.

`rates` holds the fault rates, `faults` makes them happen, `data` has scripts use data sets, `shapes`
draws small jobs for a sweep, `cluster` holds everything together, `invariants` checks, `look` reads the
job's state for all of them, and `report` says what was seen.

All randomness comes from one seed, and nothing depends on the order of a set or on the wall clock: one
seed gives one event log, byte for byte. A seed that breaks an invariant is therefore a test.

The simulated network does to messages what TCP and the numbering of events allow: they are late, they
stop coming, they are lost together with the stream from some point on, and those that were not
acknowledged are sent again on the next one, so that the coordinator may see them twice. A crash of
the coordinator loses what was not journaled, or what was journaled and not yet acted upon.
"""
