"""HTTP server: OpenAI's completions and chat API over the async engine (L6).

``protocol`` says what a request may contain, ``generation`` runs it, ``streaming`` and ``responses`` shape the answer,
``errors`` owns every failure's shape, ``app`` ties routes together and ``runner`` owns the process's life.
"""
