"""A real local Kubernetes cluster, from package registries alone: `python3 -m cluster up`.

Standard library only, so that it runs before anything is installed. `docs/local-cluster.md` tells the user's
side; `__main__.py` is the list of steps in order; each other file is one of them.

The pure parts (what a file has to say) are apart from the parts that touch the machine:

    capabilities, kind_config, image_archive, content, go_tools (table), registry_hosts, daemon_config   pure
    shell, steps, docker_engine, rootfs, node_image, registry, kind_cluster, smoke                        touch the machine
"""
