"""Why a job stands still.

An agent looks at its ranks: `stacks` (where each thread is, by py-spy, or by `faulthandling` where
py-spy may not look), `proc` (what the kernel says) and `flight` (which collectives each rank entered,
by torch's recorder, read without torch). `verdict` then names the rank that the others wait for, or
says that it does not know. Only `verdict` concludes anything, and it is pure.
"""
