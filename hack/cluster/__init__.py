"""A real local Kubernetes cluster, from package registries alone: `python3 -m hack.cluster up`.

Standard library only, so that it runs before anything is installed. `docs/local-cluster.md` tells the user's
side; `__main__.py` is the list of steps in order; each other file is one of them.

    up            the order of things
    docker_engine, runc_wrapper, apt            an engine that answers, and can run a privileged container
    go_tools, go_toolchain, uv_tool             pinned tools, compiled or installed once per machine
    base_image, node_image, image_archive       images without an image registry
    registry, image_hub                         the registry beside the cluster; is a public one in reach?
    kind_config, kind_cluster, smoke            the cluster: what it is, its life, one real question to it
    content, paths, lock, shell, steps, errors  what all of them use
"""
