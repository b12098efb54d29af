"""The prefill speed, measured from the durations of steps."""

from __future__ import annotations

from warmfleet_worker.speed_meter import SpeedMeter


def test_speed_is_prefill_tokens_over_busy_time_and_idle_time_does_not_count() -> None:
    meter = SpeedMeter()
    meter.scheduled(1, 10.0)
    meter.done(1, 10.5, 2_000, 3)
    meter.scheduled(2, 100.0)
    meter.done(2, 100.5, 2_000, 0)
    assert meter.speed_tps == 4_000


def test_overlapping_steps_count_their_time_once() -> None:
    meter = SpeedMeter()
    meter.scheduled(1, 0.0)
    meter.scheduled(2, 0.1)
    meter.done(1, 1.0, 1_000, 0)
    meter.done(2, 2.0, 1_000, 0)
    assert meter.speed_tps == 1_000


def test_decode_steps_and_small_prefills_do_not_count() -> None:
    meter = SpeedMeter()
    for step in range(100):
        meter.scheduled(step, float(step))
        meter.done(step, step + 0.9, 20, 0)
        meter.done(step, step + 0.9, 200, 300)
    assert meter.speed_tps == 0


def test_a_step_without_a_result_is_skipped() -> None:
    meter = SpeedMeter()
    meter.scheduled(1, 0.0)
    meter.scheduled(2, 5.0)
    meter.done(2, 6.0, 1_000, 0)
    assert meter.speed_tps == 1_000


def test_old_measurements_fade() -> None:
    meter = SpeedMeter()
    for step in range(40):
        meter.scheduled(step, float(step))
        meter.done(step, step + 1.0, 1_000 if step < 20 else 4_000, 0)
    assert 3_000 < meter.speed_tps < 4_000


def test_the_least_time_of_a_step_is_that_of_steps_that_decode_a_few_tokens() -> None:
    meter = SpeedMeter()
    for step in range(60):
        prefill, decode, seconds = ((1_000, 4, 0.5), (0, 200, 0.2), (0, 4, 0.02))[step % 3]
        meter.scheduled(step, float(step))
        meter.done(step, step + seconds, prefill, decode)
        assert meter.step_us == (0 if step < 23 else 20_000), "eight of them tell it"
    meter.scheduled(60, 60.0)
    meter.done(60, 69.0, 0, 1)
    assert meter.step_us == 20_000, "a step that was held up changes nothing"
