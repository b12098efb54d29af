# vLLM with the Warmfleet plugin: the upstream image and one small wheel. Build it from the top of the repository, on the
# vLLM release that you run (0.28 or newer):
#   docker build -f k8s/images/worker.Dockerfile --build-arg VLLM=vllm/vllm-openai:v0.32.0 -t warmfleet-worker:0.1.0 .
ARG VLLM=vllm/vllm-openai:v0.32.0
# hadolint ignore=DL3006
FROM ${VLLM}
COPY worker_plugin /src/worker_plugin
# vLLM finds the plugin by its entry point. The plugin needs only redis. Uid 65532 gets an account, because libraries of
# the engine look up the name of their user.
RUN python3 -m pip install --no-cache-dir /src/worker_plugin \
    && rm -r /src \
    && useradd --uid 65532 --no-create-home --home-dir /cache worker
USER 65532:65532
