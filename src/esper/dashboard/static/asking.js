"use strict";
// How the live pages ask `esper serve`, and say that it does not answer.

const address = (name) => encodeURIComponent(name).replaceAll("%2F", "/");
const runsQuery = (names) => names.map((name) => `run=${encodeURIComponent(name)}`).join("&");

function say(text) {
  byId("connection").textContent = text;
}

async function ask(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 200)}`);
  return answer.json();
}

// Acts now, and again so many seconds after each time; returns what ends that.
function every(seconds, act) {
  let timer = null;
  let isOver = false;
  const turn = async () => {
    try {
      await act();
      say("");
    } catch (problem) {
      say(`no answer from esper serve (${problem.message})`);
    }
    if (!isOver) timer = setTimeout(turn, 1000 * seconds);
  };
  turn();
  return () => {
    isOver = true;
    clearTimeout(timer);
  };
}
