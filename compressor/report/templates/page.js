// Draws every chart of the page with Vega, anew when the width or the colour scheme changes. No expression is compiled
// (`ast`), so the page needs no permission to evaluate code.
const dark = matchMedia("(prefers-color-scheme: dark)");
const darkened = JSON.parse(document.body.dataset.dark);
const options = {
  ast: true,
  actions: false,
  renderer: "svg",
  defaultStyle: false,
  tooltip: { theme: "page", disableDefaultStyle: true },
};
const drawn = new Map();

// A specification for this width and colour scheme: no text is longer than the plot is wide.
function read(text, width) {
  return JSON.parse(text, (key, value) => {
    if (key === "limit") return Math.min(value, width - 60);
    return dark.matches && typeof value === "string" && Object.hasOwn(darkened, value) ? darkened[value] : value;
  });
}

async function draw(place) {
  const room = place.clientWidth;
  let width = room - 60; // the axis and the padding take about as much
  let columns;
  for (let tries = 0; room > 0 && tries < 4; tries++) {
    const spec = read(place.dataset.spec, width);
    if (columns) Object.assign(spec.config.legend, { columns, labelLimit: room - 90 });
    for (const panel of spec.vconcat ?? [spec]) panel.width = Math.max(width, 100);
    drawn.get(place)?.finalize();
    const result = await vegaEmbed(place, spec, options);
    drawn.set(place, result);
    // a tap moves no pointer, so it asks for the note by itself
    result.view.addEventListener("click", (event, item) => result.view.tooltip()(null, event, item, item?.tooltip));
    const over = place.querySelector("svg").getBoundingClientRect().width - room;
    if (Math.abs(over) < 1.5) break;
    if (over > 40 && !columns) columns = 1; // the legend is wider than the page
    else width -= over;
  }
}

async function drawAll() {
  for (const place of document.querySelectorAll(".chart")) await draw(place);
  document.body.dataset.drawn = "yes";
}

let last = document.body.clientWidth;
let waiting;
function again() {
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 120);
}
dark.addEventListener("change", again);
new ResizeObserver(() => {
  if (document.body.clientWidth === last) return;
  last = document.body.clientWidth;
  again();
}).observe(document.body);
drawAll();
