"""Finds out why a job makes no progress.

An agent looks at its ranks: `stacks` (where each thread is, by py-spy, or by `faulthandling` where
py-spy may not read) and `flight` (which collectives each rank entered, by torch's recorder, read
without torch). `frames` decides what a stack means, `fronts` where each process group stands,
`proofs` what of it no patience changes, and `pauses` what a rank does by well-known names.
`verdict` then names the rank that the others wait for, or says that it does not know; it alone
concludes anything, and it is pure.
"""
