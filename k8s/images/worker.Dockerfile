# vLLM with the Warmfleet plugin: nothing but one small wheel on top of the upstream image. Build from the top of the
# repository, on the vLLM release that you run (0.28 or newer):
#   docker build -f k8s/images/worker.Dockerfile --build-arg VLLM=vllm/vllm-openai:v0.32.0 -t warmfleet-worker:0.1.0 .
ARG VLLM=vllm/vllm-openai:v0.32.0
# hadolint ignore=DL3006
FROM ${VLLM}
COPY worker_plugin /src/worker_plugin
# vLLM finds the plugin by its entry point; only redis comes along. An account for uid 65532, because libraries of
# the engine look up the name of their user.
RUN python3 -m pip install --no-cache-dir /src/worker_plugin \
    && rm -r /src \
    && useradd --uid 65532 --no-create-home --home-dir /cache worker
USER 65532:65532
