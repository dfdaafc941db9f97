"""The docker backend: every sandbox a container, with an agent of ours beside its programs.

::

    provider.py      makes cells, and leaves none behind
      confinement.py   how a container is closed: the configuration that the engine is given
      engine.py        the engine's daemon, asked by the `docker` package, in threads
      ownership.py     whose a container is; keeper.py removes what a killed host leaves
    cell.py          a container as a cell: programs, files
      process.py       a program whose output is read as it comes
      bounds.py        what all programs of a container share
      request.py       what an agent is asked, packed; judgement.py, how a program ended
      tunnel_host.py   its way to the network, if it has one: the outer end of agent/tunnel.py
    agent_link.py    the host's end of an agent; stream.py, the engine's stream under it
      boot.py          how an agent gets into a container
    agent/           what runs there

    base_image.py    the default image; images.py, those of Dockerfiles and folders, as far as dockerfile.py lets
      build.py         one build, and what it may use

Named so as not to be taken for the `docker` package, which `engine.py` alone imports.
"""
