"""Where a model comes from, and how it gets into a folder that a server can trust.

    HuggingFace ──▶ Resolved ──▶ Transfer ──▶ staged files ──▶ ModelFolder.publish ──▶ .millstream-complete.json
    ImageSource ──▶ (names, sizes, digests)    (resume, verify)     (rename, marker last)

    any source, or a folder ──▶ config.json + safetensors headers ──▶ describe ──▶ a shape of at most 4 KiB

An init container runs `fetch`, a Job runs `inspect`. Nothing here imports torch, and nothing but the standard library
is needed: `urllib` brings proxies, TLS and timeouts, and what a download needs beyond that (a Range that resumes, a
digest, a credential that never leaves its own origin) is the subject of these files. `huggingface_hub` is not used
for bytes because it compares sizes, not digests, and treats `HF_HUB_OFFLINE`, which our image sets for the server,
as an order to this process too.
"""
