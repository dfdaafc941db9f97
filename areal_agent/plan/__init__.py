"""`python -m areal_agent.plan`: how many GPUs should roll out, and how many train. It advises and moves nothing.

::

    __main__.py ─▶ calibration.py  a run's records, or guesses, made into `Costs`
                ─▶ simulation.py   the discrete-event model: costs and a `Layout` in, the ends of train steps out
                ─▶ advice.py       every split of the GPUs, its bottleneck, and what a change would bring
"""
