// Draw each chart in place of its picture. Sliders and menus are computed in the page.
document.addEventListener("DOMContentLoaded", () => {
  for (const chart of document.querySelectorAll(".live-chart")) {
    const spec = JSON.parse(chart.querySelector("script").textContent);
    const picture = chart.querySelector("img");
    const drawing = document.createElement("div");
    chart.append(drawing);
    vegaEmbed(drawing, spec, { actions: false, renderer: "svg" }).then(
      (result) => {
        picture.remove();
        chart.view = result.view;
        const svg = drawing.querySelector("svg");
        svg.setAttribute("role", "img");
        svg.setAttribute("aria-label", spec.description || picture.alt);
        svg.style.maxWidth = `max(100%, ${0.65 * svg.getAttribute("width")}px)`;
      },
      (error) => {
        drawing.remove();
        console.error(error);
      },
    );
  }
});
