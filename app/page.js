// A click on a token of an answer marks what it retrieved: in the document, and on the map above, whose marks lead there.
function showRetrieved(token) {
  for (const old of document.querySelectorAll(".chosen, .hit")) old.classList.remove("chosen", "hit");
  token.classList.add("chosen");
  const map = document.getElementById("map");
  if (!map) return;
  map.replaceChildren();
  const found = token.dataset.retrieved.split(" ").map((place) => place.split(":").map(Number));
  const most = Math.max(...found.map(([, times]) => times));
  for (const [stretch, times] of found) {
    const here = document.getElementById(`stretch-${stretch}`);
    here.classList.add("hit");
    here.style.setProperty("--weight", times / most);
    here.title = times === 1 ? "retrieved once" : `retrieved ${times} times`;
    const tick = document.createElement("i");
    tick.style.left = `${(100 * stretch) / map.dataset.stretches}%`;
    tick.style.opacity = 0.35 + (0.65 * times) / most;
    tick.addEventListener("click", () => bringIntoView(here));
    map.append(tick);
  }
  const what = token.closest(".everything") ? token.textContent : `what “${token.textContent}” retrieved`;
  document.querySelector("#document .legend").textContent = `Marked: ${what} (stronger: more often)`;
  bringIntoView(document.getElementById(`stretch-${found[0][0]}`));
}

function bringIntoView(stretch) {
  const text = document.getElementById("text");
  text.scrollTop = stretch.offsetTop - text.clientHeight / 3;
}

document.addEventListener("click", (event) => {
  const token = event.target.closest("[data-retrieved]");
  if (token) showRetrieved(token);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches("[data-retrieved]")) showRetrieved(event.target);
});

// What the latest question and answer retrieved most is marked once it is on the page, without a click.
new MutationObserver(() => {
  const latest = document.querySelector("#conversation .latest [data-retrieved]:not([data-shown])");
  if (!latest) return;
  latest.dataset.shown = "";
  showRetrieved(latest);
}).observe(document, { childList: true, subtree: true });

// A browser opens files that are dropped beside a dropzone in the page's place.
for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());
