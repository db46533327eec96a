"""Scaling: workers over the day, the forecast beside what came, and why a decision was made."""

from control_plane.console_schemas import ScalingPage, Span
from ui.charts import lines
from ui.frame import figures, live_page, look, plot, unavailable


def draw(page: ScalingPage, span: Span) -> None:
    figures(
        ("Workers now", str(page.num_workers), "engines that serve"),
        ("Autoscaling", "on" if page.autoscaling.available else "not available", page.autoscaling.reason),
        ("Forecast", "on" if page.forecast.available else "not available", page.forecast.reason),
    )
    workers = lines(
        page,
        look(span),
        "Workers",
        "workers",
        {"workers": "workers"},
        least_top=5,
        is_filled=True,
        height=300,
    )
    plot(workers, "workers")
    unavailable(page.autoscaling, "Autoscaling, with the reasons of its decisions,")
    unavailable(page.forecast, "The forecast, as a band beside what came,")


live_page("scaling", "Scaling", draw)
