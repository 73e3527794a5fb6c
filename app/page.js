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
    here.title = `retrieved ${times} times`;
    const tick = document.createElement("i");
    tick.style.left = `${(100 * stretch) / map.dataset.stretches}%`;
    tick.style.opacity = 0.35 + (0.65 * times) / most;
    tick.addEventListener("click", () => bringIntoView(here));
    map.append(tick);
  }
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
