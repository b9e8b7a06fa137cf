"""Healthy: steps that are not like each other, and loops that are not like the usual one."""

from __future__ import annotations

from detection.patterns.pattern import Pattern, between, healthy, whole_script

ROWS: list[Pattern] = [
    healthy(
        "growing",
        "Sequences grow, and steps with them, to 5 s more than at first.",
        whole_script("""
            run.begin()
            for step in run.steps():
                progress = step / run.last
                run.train(seconds=run.step_s + 5 * progress ** 12)
            run.end()
        """),
        lasts_s=20,
    ),
    healthy(
        "bimodal",
        "Every seventh step takes ten times as long, on one rank after the other.",
        whole_script("""
            run.begin()
            for step in run.steps():
                long = step % 7 == 0 and step // 7 % world == rank
                run.train(seconds=min(10 * run.step_s, run.step_s + 4) if long else None)
            run.end()
        """),
        lasts_s=20,
    ),
    healthy(
        "accumulate",
        "Gradients of many batches are added up before ranks meet; one rank has more of them.",
        whole_script("""
            run.begin()
            for step in run.steps():
                run.optimizer.zero_grad()
                run.sync_gradients(False)
                with run.no_sync():
                    for _ in range(8 if rank else 12):
                        run.gradients_alone(seconds=min(run.step_s, 0.25))
                run.sync_gradients(True)
                run.gradients()
                run.optimizer.step()
            run.end()
        """),
        lasts_s=60,
        kinds=("plain", "ddp"),
    ),
    healthy(
        "two-optimizers",
        "Two models with an optimizer each, trained by turns; rank 0 looks at samples for 6 s.",
        whole_script("""
            run.begin()
            critic = torch.nn.Linear(64, 1)
            other = torch.optim.RMSprop(critic.parameters())
            for step in run.steps():
                run.train()
                other.zero_grad()
                critic(run.batch).mean().backward()
                for parameter in critic.parameters():
                    dist.all_reduce(parameter.grad)
                other.step()
                if run.now(step) and rank == 0:
                    burn(6)
            run.end()
        """),
        lasts_s=6,
    ),
    healthy(
        "no-step-kept",
        "An optimizer without state, and a pause of 5 s.",
        whole_script("""
            run.begin(torch.optim.SGD)
            for step in run.steps():
                run.train()
                if run.now(step) and rank == 0:
                    time.sleep(5)
            run.end()
        """),
        lasts_s=5,
    ),
    healthy(
        "no-optimizer",
        "Parameters are changed by hand, and rank 0 pauses for 5 s.",
        whole_script("""
            run.begin()
            weights = torch.ones(64)
            for step in run.steps():
                time.sleep(run.step_s)
                gradient = weights * 0.1
                dist.all_reduce(gradient)
                weights -= 0.01 * gradient
                if run.now(step) and rank == 0:
                    time.sleep(5)
            run.end()
        """),
        lasts_s=5,
        kinds=("plain",),
    ),
    healthy(
        "skewed-barriers",
        "Ranks come to barriers seconds apart.",
        between("""
            for turn in range(3):
                time.sleep(4 if rank == turn % world else 0)
                dist.barrier()
        """),
        lasts_s=12,
    ),
    healthy(
        "monitored-barrier",
        "Rank 0 waits for the others in a monitored barrier, and one is late.",
        between("""
            if rank == world - 1:
                burn(10)
            dist.monitored_barrier()
        """),
        lasts_s=10,
    ),
    healthy(
        "late-wait",
        "A rank begins a collective, does something else, and waits for it later.",
        between("""
            pending = dist.all_reduce(torch.ones(1024), async_op=True)
            if rank == guilty:
                time.sleep(8)
            pending.wait()
        """),
        lasts_s=8,
    ),
    healthy(
        "all-sleep",
        "All ranks sleep for 30 s.",
        between("time.sleep(30)"),
        lasts_s=30,
    ),
]
