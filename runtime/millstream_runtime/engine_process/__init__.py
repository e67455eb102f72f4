"""The engine in a process of its own, and what crosses the border between it and the HTTP server.

    HTTP process (server/)                          engine process (this package, engine/, models/)
    FastAPI, tokenizer, metrics     --Command-->    EngineLoop: one Engine, one step after another
    no torch                        <--Event----    one message a step, whatever the batch

A step that holds the interpreter never delays an HTTP answer, and an engine that is killed takes no client with it.
`messages` says what is sent, `framing` how it lies on the socket, `loop` what the engine does with it.
"""
