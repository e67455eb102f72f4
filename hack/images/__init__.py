"""Operator and runtime images, assembled from RUN-free Dockerfiles and pushed straight to a registry.

    Dockerfile + inputs --hash--> tag --in the registry?--> yes: done
                                                       \\-> no: stage -> tar layers -> push -> manifest

Why not `docker build`: the CUDA build of torch is 4.5 GB. A daemon copies it four times (context, COPY, commit,
compress) and spends minutes of processor time to gzip what travels over loopback. Here a layer is written once, as
an uncompressed tar, while it is being hashed. The Dockerfiles stay plain Dockerfiles: `python -m hack.images
stage runtime DIR` writes the build context with which `docker build` makes the same image.

Read in this order: `dockerfile` (what an image is made of), `trees` and `dependencies` (where the files come from),
`layer` (files -> bytes), `registry` (bytes -> registry), `build` (the whole).
"""
